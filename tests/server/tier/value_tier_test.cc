// SPDX-License-Identifier: Apache-2.0
// The contract of server/tier/value_tier.h, held by every implementation.
#include "server/tier/value_tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "server/tier/blocking_calls.h"
#include "tests/server/tier/tier_values.h"
#include "tests/server/tier/value_tiers.h"

namespace kvstrata {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Sizes = std::vector<uint64_t>;

Deadline In(milliseconds time) { return std::chrono::steady_clock::now() + time; }

// The buffers of a value at addresses of no alignment.
class OddBuffers {
 public:
  explicit OddBuffers(const Sizes& sizes) {
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += size + 3;
    data_ = std::make_shared<std::vector<std::byte>>(bytes);
    std::byte* at = data_->data();
    for (const uint64_t size : sizes) {
      at += 3;
      buffers_.emplace_back(at, size);
      at += size;
    }
  }
  const std::vector<std::span<std::byte>>& buffers() const { return buffers_; }
  std::shared_ptr<void> owner() const { return data_; }

 private:
  std::shared_ptr<std::vector<std::byte>> data_;
  std::vector<std::span<std::byte>> buffers_;
};

bool Same(const std::vector<std::span<std::byte>>& a, const std::vector<std::span<std::byte>>& b) {
  return std::ranges::equal(a, b, [](auto x, auto y) { return std::ranges::equal(x, y); });
}

// Requests of a call and its end.
template <typename Request>
struct Batch {
  std::vector<Request> requests;
  std::atomic<int> ends = 0;
  std::thread::id thread;
  std::stop_source cancel;
  std::promise<void> end;
  std::shared_future<void> ended = end.get_future().share();

  TierCall Call(Deadline deadline) {
    return {deadline, cancel.get_token(), [this] {
              thread = std::this_thread::get_id();
              if (++ends == 1) end.set_value();
            }};
  }
  bool EndsIn(milliseconds time) const { return ended.wait_for(time) == std::future_status::ready; }
  std::set<Code> Codes() const {
    std::set<Code> codes;
    for (const Request& request : requests) codes.insert(request.status.code());
    return codes;
  }
};

class ValueTierTest : public ::testing::TestWithParam<TierRow> {
 protected:
  static constexpr uint64_t kBytes = 8 << 20;

  ValueTier* tier() { return under_->tier(); }
  Status PutValue(const std::string& key, const Sizes& sizes, uint64_t version = 0) {
    TierPut put = PutOf(key, ValueOf(key, version, sizes));
    PutAndWait(tier(), {&put, 1}, Soon());
    return put.status;
  }
  // The status of a read, INTERNAL where it is OK and has other bytes.
  Status GetValue(const std::string& key, const Sizes& sizes, uint64_t version = 0,
                  bool inspects = false) {
    const AlignedBuffers into(sizes);
    TierGet get{key, into.buffers(), into.owner(), {}, false, inspects};
    GetAndWait(tier(), {&get, 1}, Soon());
    const bool wrong = get.status.ok() && !SameBytes(into, ValueOf(key, version, sizes));
    return wrong ? Internal("TEST", "other bytes") : get.status;
  }
  void ExpectEntries(uint64_t entries) {
    if (GetParam().surveys) {
      EXPECT_EQ(tier()->Stats().entries, entries);
    }
  }
  bool Holds(const std::string& key) { return !KnownSizes(tier(), key).empty(); }
  // Gets of keys "k0" to "kN" of these sizes.
  void AddGets(Batch<TierGet>* batch, int n, const Sizes& sizes) {
    for (int i = 0; i < n; ++i) {
      into_.push_back(std::make_unique<AlignedBuffers>(sizes));
      const AlignedBuffers& into = *into_.back();
      batch->requests.push_back({"k" + std::to_string(i), into.buffers(), into.owner(), {}});
    }
  }
  void AddPuts(Batch<TierPut>* batch, int n, const Sizes& sizes) {
    for (int i = 0; i < n; ++i) {
      const std::string key = "k" + std::to_string(i);
      batch->requests.push_back(PutOf(key, ValueOf(key, 0, sizes)));
    }
  }

  std::unique_ptr<TierUnderTest> under_ = GetParam().make(kBytes);
  std::vector<std::unique_ptr<AlignedBuffers>> into_;
};

TEST_P(ValueTierTest, ValuesOfAllShapesComeBackIntoAnyBuffers) {
  under_ = GetParam().make(64 << 20);  // nothing is to be evicted
  const std::vector<Sizes> shapes = {{1},
                                     {4096},
                                     {4097},
                                     {65536},
                                     {65537},
                                     {100000, 1, 4096},
                                     {900000},
                                     {512, 512, 512},
                                     {300000, 300},
                                     Sizes(16, 20001),
                                     Sizes(16, 4095),
                                     Sizes(16, 1)};
  std::vector<TierPut> puts;
  std::vector<AlignedBuffers> values;
  std::vector<OddBuffers> odd;
  for (size_t i = 0; i < shapes.size(); ++i) {
    for (const int kind : {0, 1, 2}) {  // aligned, with room for a header, of no alignment
      const std::string key = std::to_string(i) + "/" + std::to_string(kind);
      values.push_back(ValueOf(key, 0, shapes[i], kind == 1));
      puts.push_back(PutOf(key, values.back()));
      odd.emplace_back(shapes[i]);
      if (kind != 2) continue;
      for (size_t b = 0; b < shapes[i].size(); ++b) {
        std::ranges::copy(values.back().buffers()[b], odd.back().buffers()[b].begin());
      }
      puts.back().buffers.assign(odd.back().buffers().begin(), odd.back().buffers().end());
      puts.back().keep = odd.back().owner();
    }
  }
  PutAndWait(tier(), puts, Soon());
  for (const TierPut& put : puts) ASSERT_TRUE(put.status.ok()) << put.status.ToString();
  std::vector<TierGet> gets;
  std::vector<OddBuffers> odd_into;
  std::vector<AlignedBuffers> into;
  for (size_t i = 0; i < puts.size(); ++i) {
    const Sizes& sizes = shapes[i / 3];
    EXPECT_TRUE(std::ranges::equal(KnownSizes(tier(), puts[i].key).all(), sizes));
    odd_into.emplace_back(sizes);
    into.emplace_back(sizes, i % 2 == 0);
    gets.push_back({puts[i].key, into[i].buffers(), into[i].owner(), {}, i % 2 == 0});
    gets.push_back({puts[i].key, odd_into[i].buffers(), odd_into[i].owner(), {}});
  }
  GetAndWait(tier(), gets, Soon());
  for (size_t i = 0; i < gets.size(); ++i) {
    ASSERT_TRUE(gets[i].status.ok()) << gets[i].status.ToString();
    EXPECT_TRUE(Same(gets[i].buffers, values[i / 2].buffers())) << gets[i].key << " " << i % 2;
  }
}

TEST_P(ValueTierTest, EqualKeysAreEqualBytes) {
  ASSERT_TRUE(PutValue("a", {5000}).ok());
  EXPECT_TRUE(PutValue("a", {5000}, 1).ok());
  EXPECT_TRUE(GetValue("a", {5000}, 0).ok()) << "the first one stays";
  const AlignedBuffers first = ValueOf("b", 0, {100}), second = ValueOf("b", 1, {100});
  std::vector<TierPut> twice = {PutOf("b", first), PutOf("b", second)};
  PutAndWait(tier(), twice, Soon());
  EXPECT_TRUE(twice[0].status.ok() && twice[1].status.ok());
  EXPECT_TRUE(GetValue("b", {100}, 0).ok()) << "the first of a batch counts";
}

TEST_P(ValueTierTest, BadRequestsAreRefusedOneByOne) {
  const std::string longest(kMaxValueKeyBytes, 'k');
  Batch<TierPut> batch;
  const auto add = [&](const std::string& key, const Sizes& sizes) {
    batch.requests.push_back(PutOf(key, ValueOf("k", 0, sizes)));
  };
  add("", {10});
  add(longest + "k", {10});
  add("none", {});
  add("many", Sizes(17, 10));
  add("empty", {10});
  batch.requests.back().buffers.emplace_back();
  add(longest, {10});
  tier()->Put(batch.requests, batch.Call(Soon()));
  batch.ended.wait();
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(batch.requests[i].status.code(), Code::kInvalidArgument) << i;
    EXPECT_FALSE(Holds(batch.requests[i].key));
  }
  EXPECT_TRUE(batch.requests[5].status.ok());
  for (const Sizes& other : {Sizes{11}, Sizes{5, 5}, Sizes{}}) {
    EXPECT_EQ(GetValue(longest, other).code(), Code::kInvalidArgument);
  }
}

TEST_P(ValueTierTest, WhatIsForgottenIsGoneAndMayComeAgainWithOtherBytes) {
  EXPECT_EQ(GetValue("a", {7000}).code(), Code::kNotFound);
  for (uint64_t version = 0; version < 3; ++version) {
    ASSERT_TRUE(PutValue("a", {7000}, version).ok());
    EXPECT_TRUE(GetValue("a", {7000}, version).ok());
    const std::vector<std::string> keys = {"a", "never there"};
    EXPECT_TRUE(ForgetAndWait(tier(), keys, Soon(), version == 1).ok());
    EXPECT_FALSE(Holds("a"));
    EXPECT_EQ(GetValue("a", {7000}).code(), Code::kNotFound);
  }
}

TEST_P(ValueTierTest, ADurablePutIsThereAsAnother) {
  TierPut put = PutOf("a", ValueOf("a", 0, {100, 200}));
  PutAndWait(tier(), {&put, 1}, Soon(), {}, true);
  EXPECT_TRUE(put.status.ok()) << put.status.ToString();
  EXPECT_TRUE(GetValue("a", {100, 200}).ok());
}

// One thread puts versions of a value and forgets them, others read: never a mixture.
TEST_P(ValueTierTest, AValueIsThereWholeOrNotAtAll) {
  const Sizes sizes(16, 9000);
  std::atomic<bool> over = false;
  std::atomic<int> whole = 0, mixed = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      const AlignedBuffers into(sizes);
      while (!over) {
        TierGet get{"a", into.buffers(), into.owner(), {}};
        GetAndWait(tier(), {&get, 1}, Soon());
        if (!get.status.ok()) continue;
        uint64_t version = 0;
        while (version < 40 && !SameBytes(into, ValueOf("a", version, sizes))) ++version;
        ++(version < 40 ? whole : mixed);
      }
    });
  }
  for (uint64_t version = 0; version < 40; ++version) {
    EXPECT_TRUE(PutValue("a", sizes, version).ok());
    while (whole <= static_cast<int>(version)) std::this_thread::yield();
    EXPECT_TRUE(ForgetAndWait(tier(), std::vector<std::string>{"a"}, Soon()).ok());
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(mixed, 0);
}

TEST_P(ValueTierTest, AProbeOfThePastIsAnsweredAtOnce) {
  ASSERT_TRUE(PutValue("a", {10, 5000}).ok());
  under_->Stall();
  std::vector<TierProbe> probes = {{"a", {}}, {"b", ValueSizes(Sizes{1})}};
  int ends = 0;
  tier()->Probe(probes, {{}, {}, [&ends] { ++ends; }});
  EXPECT_EQ(ends, 1);
  EXPECT_TRUE(std::ranges::equal(probes[0].sizes.all(), Sizes{10, 5000}));
  EXPECT_TRUE(probes[1].sizes.empty());
  under_->Release();
}

TEST_P(ValueTierTest, EndsInAThreadOfTheTiers) {
  Batch<TierPut> put;
  AddPuts(&put, 1, {10});
  tier()->Put(put.requests, put.Call(Soon()));
  put.ended.wait();
  Batch<TierGet> get;
  AddGets(&get, 1, {10});
  tier()->Get(get.requests, get.Call(Soon()));
  get.ended.wait();
  Batch<TierForget> forget;
  forget.requests.push_back({"k0", {}});
  tier()->Forget(forget.requests, forget.Call(Soon()));
  forget.ended.wait();
  for (const std::thread::id id : {put.thread, get.thread, forget.thread}) {
    EXPECT_NE(id, std::this_thread::get_id());
  }
}

TEST_P(ValueTierTest, AnEmptyBatchEnds) {
  Batch<TierGet> get;
  tier()->Get(get.requests, get.Call(Soon()));
  EXPECT_TRUE(get.EndsIn(seconds(30)));
  Batch<TierPut> put;
  tier()->Put(put.requests, put.Call(Soon()));
  EXPECT_TRUE(put.EndsIn(seconds(30)));
}

// Where a call ends the next one is made, as a load by batches does.
TEST_P(ValueTierTest, TheEndOfACallMayMakeTheNext) {
  ASSERT_TRUE(PutValue("k0", {100}).ok());
  Batch<TierGet> get;
  AddGets(&get, 1, {100});
  std::promise<void> last;
  int left = 50;
  std::function<void()> next = [&] {
    EXPECT_TRUE(get.requests[0].status.ok());
    if (--left == 0) return last.set_value();
    tier()->Get(get.requests, {Soon(), {}, next});
  };
  tier()->Get(get.requests, {Soon(), {}, next});
  EXPECT_EQ(last.get_future().wait_for(seconds(30)), std::future_status::ready);
}

// --- deadlines -----------------------------------------------------------------------------------

TEST_P(ValueTierTest, ACallOfThePastHasNoEffect) {
  ASSERT_TRUE(PutValue("k0", {10}).ok());
  Batch<TierPut> put;
  AddPuts(&put, 2, {10});
  tier()->Put(put.requests, put.Call({}));
  put.ended.wait();
  EXPECT_EQ(put.Codes(), std::set{Code::kDeadlineExceeded});
  EXPECT_FALSE(Holds("k1"));
  Batch<TierGet> get;
  AddGets(&get, 1, {10});
  tier()->Get(get.requests, get.Call({}));
  get.ended.wait();
  EXPECT_EQ(get.Codes(), std::set{Code::kDeadlineExceeded});
  Batch<TierForget> forget;
  forget.requests.push_back({"k0", {}});
  tier()->Forget(forget.requests, forget.Call({}));
  forget.ended.wait();
  EXPECT_EQ(forget.Codes(), std::set{Code::kDeadlineExceeded});
  EXPECT_TRUE(Holds("k0"));
  TierWalk walk;
  std::promise<void> end;
  tier()->Walk(&walk, {{}, {}, [&end] { end.set_value(); }});
  end.get_future().wait();
  EXPECT_EQ(walk.status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(walk.cursor, 0u);
}

TEST_P(ValueTierTest, ACallEndsAtItsDeadlineThoughNothingAnswers) {
  ASSERT_TRUE(PutValue("k0", {100000}).ok());
  under_->Stall();
  Batch<TierGet> get;
  AddGets(&get, 1, {100000});
  tier()->Get(get.requests, get.Call(In(milliseconds(20))));
  EXPECT_TRUE(get.EndsIn(seconds(20)));
  EXPECT_EQ(get.Codes(), std::set{Code::kDeadlineExceeded});
  Batch<TierPut> put;
  put.requests.push_back(PutOf("new", ValueOf("new", 0, {100000})));
  tier()->Put(put.requests, put.Call(In(milliseconds(20))));
  EXPECT_TRUE(put.EndsIn(seconds(20)));
  EXPECT_EQ(put.Codes(), std::set{Code::kDeadlineExceeded});
  EXPECT_FALSE(Holds("new"));
  under_->Release();
  EXPECT_TRUE(GetValue("k0", {100000}).ok());
}

// Patient calls of others keep every device of the tier busy meanwhile.
TEST_P(ValueTierTest, ACallEndsAtItsDeadlineBehindOthers) {
  ASSERT_TRUE(PutValue("k0", {100000}).ok());
  under_->Stall();
  Batch<TierGet> patient[4], hasty;
  Batch<TierPut> patient_put, hasty_put;
  for (Batch<TierGet>& get : patient) {
    AddGets(&get, 1, {100000});
    tier()->Get(get.requests, get.Call(Soon()));
  }
  patient_put.requests.push_back(PutOf("new", ValueOf("new", 0, {100000})));
  tier()->Put(patient_put.requests, patient_put.Call(Soon()));
  hasty_put.requests.push_back(PutOf("other", ValueOf("other", 0, {100000})));
  tier()->Put(hasty_put.requests, hasty_put.Call(In(milliseconds(20))));
  AddGets(&hasty, 1, {100000});
  tier()->Get(hasty.requests, hasty.Call(In(milliseconds(20))));
  EXPECT_TRUE(hasty.EndsIn(seconds(20)));
  EXPECT_TRUE(hasty_put.EndsIn(seconds(20)));
  EXPECT_EQ(hasty.Codes(), std::set{Code::kDeadlineExceeded});
  EXPECT_EQ(hasty_put.Codes(), std::set{Code::kDeadlineExceeded});
  for (Batch<TierGet>& get : patient) EXPECT_FALSE(get.EndsIn({}));
  under_->Release();
  for (Batch<TierGet>& get : patient) {
    get.ended.wait();
    EXPECT_EQ(get.Codes(), std::set{Code::kOk});
  }
  patient_put.ended.wait();
  EXPECT_TRUE(Holds("new"));
  EXPECT_FALSE(Holds("other"));
}

// --- cancels -------------------------------------------------------------------------------------

TEST_P(ValueTierTest, WhatIsCancelledBeforeHasNoEffect) {
  ASSERT_TRUE(PutValue("k0", {10}).ok());
  Batch<TierPut> put;
  AddPuts(&put, 3, {10});
  put.cancel.request_stop();
  tier()->Put(put.requests, put.Call(Soon()));
  Batch<TierForget> forget;
  forget.requests.push_back({"k0", {}});
  forget.cancel.request_stop();
  tier()->Forget(forget.requests, forget.Call(Soon()));
  put.ended.wait();
  forget.ended.wait();
  EXPECT_EQ(put.Codes(), std::set{Code::kAborted});
  EXPECT_EQ(forget.Codes(), std::set{Code::kAborted});
  EXPECT_TRUE(Holds("k0"));
  EXPECT_FALSE(Holds("k1"));
  Batch<TierGet> get;
  AddGets(&get, 1, {10});
  get.cancel.request_stop();
  tier()->Get(get.requests, get.Call(Soon()));
  get.ended.wait();
  EXPECT_EQ(get.Codes(), std::set{Code::kAborted});
}

TEST_P(ValueTierTest, WhatIsCancelledBehindOthersEndsAtOnce) {
  ASSERT_TRUE(PutValue("k0", {100000}).ok());
  under_->Stall();
  Batch<TierGet> first, second;
  for (Batch<TierGet>* get : {&first, &second}) {
    AddGets(get, 1, {100000});
    tier()->Get(get->requests, get->Call(Soon()));
  }
  second.cancel.request_stop();
  EXPECT_TRUE(second.EndsIn(seconds(20)));
  EXPECT_EQ(second.Codes(), std::set{Code::kAborted});
  EXPECT_FALSE(first.EndsIn({}));
  under_->Release();
  first.ended.wait();
  EXPECT_EQ(first.Codes(), std::set{Code::kOk});
}

// More requests than any tier has begun at once.
TEST_P(ValueTierTest, ACancelDuringACallLeavesWholeRequestsAlone) {
  constexpr int kMany = 300;
  const Sizes sizes = {100};
  under_->Stall();
  Batch<TierPut> put;
  AddPuts(&put, kMany, sizes);
  tier()->Put(put.requests, put.Call(Soon()));
  put.cancel.request_stop();
  under_->Release();
  put.ended.wait();
  EXPECT_TRUE(put.Codes().contains(Code::kAborted));
  int there = 0;
  for (const TierPut& one : put.requests) {
    EXPECT_EQ(Holds(one.key), one.status.ok()) << one.key;
    EXPECT_TRUE(one.status.ok() || one.status.code() == Code::kAborted);
    if (one.status.ok()) {
      EXPECT_TRUE(GetValue(one.key, sizes).ok());
    }
    there += one.status.ok();
  }
  under_->Settle();
  ExpectEntries(static_cast<uint64_t>(there));
}

TEST_P(ValueTierTest, ACancelDuringAReadLeavesWholeValues) {
  constexpr int kMany = 300;
  const Sizes sizes = {100};
  Batch<TierPut> put;
  AddPuts(&put, kMany, sizes);
  PutAndWait(tier(), put.requests, Soon());
  under_->Stall();
  Batch<TierGet> get;
  AddGets(&get, kMany, sizes);
  tier()->Get(get.requests, get.Call(Soon()));
  get.cancel.request_stop();
  under_->Release();
  get.ended.wait();
  EXPECT_TRUE(get.Codes().contains(Code::kAborted));
  for (const TierGet& one : get.requests) {
    EXPECT_TRUE(one.status.ok() || one.status.code() == Code::kAborted);
    if (one.status.ok()) {
      EXPECT_TRUE(Same(one.buffers, ValueOf(one.key, 0, sizes).buffers()));
    }
  }
  under_->Settle();
  ExpectEntries(kMany);
}

TEST_P(ValueTierTest, ACancelAfterwardsMeansNothing) {
  Batch<TierPut> put;
  AddPuts(&put, 2, {10});
  tier()->Put(put.requests, put.Call(Soon()));
  put.ended.wait();
  put.cancel.request_stop();
  EXPECT_EQ(put.Codes(), std::set{Code::kOk});
  EXPECT_TRUE(GetValue("k0", {10}).ok());
  EXPECT_EQ(put.ends, 1);
}

// --- memory of callers ---------------------------------------------------------------------------

TEST_P(ValueTierTest, BuffersAreLetGoOf) {
  std::weak_ptr<void> put_memory, get_memory;
  {
    const AlignedBuffers value = ValueOf("k0", 0, {100000}), into({100000});
    put_memory = value.owner();
    get_memory = into.owner();
    ASSERT_TRUE(PutValue("k0", {100000}).ok());
    TierPut put = PutOf("k1", value);
    PutAndWait(tier(), {&put, 1}, Soon());
    under_->Stall();
    Batch<TierGet> get;
    get.requests.push_back({"k0", into.buffers(), into.owner(), {}});
    tier()->Get(get.requests, get.Call(In(milliseconds(20))));
    get.ended.wait();
    EXPECT_EQ(get.Codes(), std::set{Code::kDeadlineExceeded});
  }
  EXPECT_TRUE(put_memory.expired());
  under_->Release();  // what the device still had in use comes back
  const Deadline end = Soon();
  while (!get_memory.expired() && std::chrono::steady_clock::now() < end) {
    EXPECT_TRUE(GetValue("k0", {100000}).ok());
  }
  EXPECT_TRUE(get_memory.expired());
}

TEST_P(ValueTierTest, ATierThatIsDestroyedEndsItsCalls) {
  ASSERT_TRUE(PutValue("k0", {100}).ok());
  under_->Stall();
  Batch<TierGet> gets[5];
  for (Batch<TierGet>& get : gets) {
    AddGets(&get, 1, {100});
    tier()->Get(get.requests, get.Call(In(milliseconds(200))));
  }
  under_->Destroy();
  for (Batch<TierGet>& get : gets) {
    ASSERT_TRUE(get.EndsIn({}));
    EXPECT_EQ(get.ends, 1);
    EXPECT_FALSE(get.requests[0].status.ok());
  }
  under_.reset();
}

// --- walks, room, damage -------------------------------------------------------------------------

TEST_P(ValueTierTest, AWalkSeesAllThatStays) {
  if (!GetParam().surveys) GTEST_SKIP() << "this tier cannot list what it holds";
  const auto key = [](const char* what, int i) { return what + std::to_string(i); };
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(PutValue(key("stays ", i), {10, 20}).ok());
    ASSERT_TRUE(PutValue(key("goes ", i), {10}).ok());
  }
  std::map<std::string, Sizes> seen;
  TierWalk walk;
  walk.most = 7;
  for (int round = 0; walk.cursor != kWalkEnd; ++round) {
    std::promise<void> end;
    tier()->Walk(&walk, {Soon(), {}, [&end] { end.set_value(); }});
    end.get_future().wait();
    ASSERT_TRUE(walk.status.ok());
    EXPECT_LE(walk.values.size(), 7u);
    for (const TierValue& value : walk.values) seen[value.key] = value.sizes;
    if (round >= 100) continue;
    const std::vector<std::string> gone = {key("goes ", 99 - round)};
    ASSERT_TRUE(ForgetAndWait(tier(), gone, Soon()).ok());
    ASSERT_TRUE(PutValue(key("comes ", round), {30}).ok());
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[key("stays ", i)], (Sizes{10, 20})) << i;
  EXPECT_FALSE(seen.contains("never"));
}

TEST_P(ValueTierTest, AnEmptyTierHasAnEmptyWalk) {
  if (!GetParam().surveys) GTEST_SKIP() << "this tier cannot list what it holds";
  int values = 0;
  EXPECT_TRUE(WalkAndWait(tier(), Soon(), [&](const TierValue&) { ++values; }).ok());
  EXPECT_EQ(values, 0);
}

// Which values go is the tier's choice.
TEST_P(ValueTierTest, AFullTierMakesRoom) {
  const Sizes sizes = {100000};
  for (int i = 0; i < 300; ++i) {  // 30 MB through 8
    const std::string key = "k" + std::to_string(i);
    ASSERT_TRUE(PutValue(key, sizes).ok()) << i;
    ASSERT_TRUE(GetValue(key, sizes).ok()) << i;
  }
  under_->Settle();
  const TierStats stats = tier()->Stats();
  if (GetParam().surveys) {
    EXPECT_GT(stats.evicted, 100u);
    EXPECT_EQ(stats.entries + stats.evicted, 300u);
    EXPECT_LE(stats.used_bytes, stats.capacity_bytes);
  }
  int held = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string key = "k" + std::to_string(i);
    held += Holds(key) && GetValue(key, sizes).ok() ? 1 : 0;
  }
  EXPECT_LT(held, 200);
}

TEST_P(ValueTierTest, AnInspectionIsNoUse) {
  if (GetParam().inspections_are_uses) GTEST_SKIP() << "see RedisValueTier";
  const Sizes sizes = {100000};
  ASSERT_TRUE(PutValue("inspected", sizes).ok());
  for (int i = 0; i < 300 && Holds("inspected"); ++i) {
    (void)GetValue("inspected", sizes, 0, true);
    const std::string key = "k" + std::to_string(i);
    ASSERT_TRUE(PutValue(key, sizes).ok());
  }
  EXPECT_FALSE(Holds("inspected"));
}

TEST_P(ValueTierTest, WhatNeverFitsIsRefused) {
  if (!GetParam().surveys) GTEST_SKIP() << "this tier cannot list what it holds";
  ASSERT_TRUE(PutValue("small", {10}).ok());
  const Code code = PutValue("huge", {4 * kBytes}).code();
  EXPECT_TRUE(code == Code::kResourceExhausted || code == Code::kInvalidArgument);
  EXPECT_FALSE(Holds("huge"));
  EXPECT_TRUE(GetValue("small", {10}).ok());
}

TEST_P(ValueTierTest, ADamagedValueLeaves) {
  const Sizes sizes = {5000, 100};
  ASSERT_TRUE(PutValue("a", sizes).ok());
  under_->Damage("a");
  EXPECT_EQ(GetValue("a", sizes).code(), Code::kDataLoss);
  EXPECT_FALSE(Holds("a"));
  EXPECT_EQ(GetValue("a", sizes).code(), Code::kNotFound);
  EXPECT_EQ(tier()->Stats().damaged, 1u);
  ASSERT_TRUE(PutValue("a", sizes).ok());
  EXPECT_TRUE(GetValue("a", sizes).ok());
}

TEST_P(ValueTierTest, StatsCount) {
  const TierStats before = tier()->Stats();
  EXPECT_EQ(before.entries, 0u);
  EXPECT_EQ(before.used_bytes, 0u);
  if (GetParam().surveys) {
    EXPECT_GE(before.capacity_bytes, kBytes);
  }
  EXPECT_EQ(before.illness, "");
  for (const char* key : {"a", "b", "c"}) ASSERT_TRUE(PutValue(key, {5000}).ok());
  EXPECT_TRUE(GetValue("a", {5000}).ok());
  EXPECT_FALSE(GetValue("z", {5000}).ok());
  EXPECT_FALSE(GetValue("z", {5000}).ok());
  ASSERT_TRUE(ForgetAndWait(tier(), std::vector<std::string>{"c"}, Soon()).ok());
  under_->Settle();
  const TierStats stats = tier()->Stats();
  ExpectEntries(2);
  EXPECT_EQ(stats.puts, 3u);
  EXPECT_EQ(stats.hits, 1u);
  EXPECT_EQ(stats.misses, 2u);
  EXPECT_EQ(stats.evicted, 0u);
  if (GetParam().surveys) {
    EXPECT_GE(stats.used_bytes, 10000u);
  }
}

// Threads put, get, forget, walk and cancel what comes to their minds: no byte is wrong, every call
// ends once, and what a call says of its requests is so.
TEST_P(ValueTierTest, AnythingAtOnce) {
  const char* given = std::getenv("KVS_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("KVS_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::vector<std::thread> threads;
  std::atomic<int> reads = 0;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      for (int i = 0; i < 200; ++i) {
        const uint64_t number = random() % 40;
        const std::string key = "v" + std::to_string(number);
        const Sizes sizes(1 + number % 16, 1 + number * 700);
        const Deadline deadline = random() % 8 == 0 ? In(milliseconds(0)) : Soon();
        std::stop_source cancel;
        std::optional<std::jthread> canceller;
        if (random() % 4 == 0) canceller.emplace([cancel]() mutable { cancel.request_stop(); });
        const uint64_t what = random() % 8;
        if (what < 3) {
          TierPut put = PutOf(key, ValueOf(key, 0, sizes));
          PutAndWait(tier(), {&put, 1}, deadline, cancel.get_token());
        } else if (what < 7) {
          const AlignedBuffers into(sizes);
          TierGet get{key, into.buffers(), into.owner(), {}};
          GetAndWait(tier(), {&get, 1}, deadline, cancel.get_token());
          reads += get.status.ok();
          if (get.status.ok()) {
            EXPECT_TRUE(SameBytes(into, ValueOf(key, 0, sizes))) << key;
          }
        } else {
          (void)ForgetAndWait(tier(), std::vector<std::string>{key}, deadline);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(reads, 0);
  EXPECT_EQ(tier()->Stats().damaged, 0u);
}

INSTANTIATE_TEST_SUITE_P(All, ValueTierTest, ::testing::ValuesIn(TierRows()),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace kvstrata
