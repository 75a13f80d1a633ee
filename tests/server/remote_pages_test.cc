// SPDX-License-Identifier: Apache-2.0
// Two nodes with disks of their own and one remote tier between them, which delays, hangs, loses
// and lies: what one computed the other opens, an open ends by its deadline, and nobody is told
// more than what came.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <thread>

#include "server/telemetry/event_ring.h"
#include "server/work/tiers/tier_chain.h"
#include "tests/fakes/copying_codec.h"
#include "tests/fakes/far_tier.h"
#include "tests/fakes/memory_value_tier.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int32_t kPrompt = 325;  // 20 pages and a bit
constexpr uint64_t kTierBytes = 16 << 20;
constexpr const char* kKeeps = "window{codec = \"packed\", max_loss = 1, keep_raw = \"host\"}";
constexpr const char* kKeepsNone = "window{codec = \"packed\", max_loss = 1, keep_raw = \"no\"}";
constexpr int32_t kPacked = 200;  // 12 whole pages, 6 extents, 8 tokens

StoreOptions Pools(uint64_t pages, const std::shared_ptr<CodecControl>& control,
                   const ClusterTenants& tenants) {
  StoreOptions options = SmallPools(pages, 64);
  options.cluster_tenants = tenants;
  options.new_recompressor = [control](const Plan& plan, const Geometry& geometry,
                                       ParametersPtr) -> std::unique_ptr<Recompressor> {
    if (plan.codec == CodecKind::kRaw) return nullptr;
    return std::make_unique<CopyingCodec>(control, geometry);
  };
  return options;
}

TierRowOptions Reused() {
  TierRowOptions options = TierRowOptions::Far();
  // A busy machine may take its time.
  options.searches->deadline = options.searches->deadline_most = seconds(60);
  return options;
}
TierRowOptions All() {
  TierRowOptions options = Reused();
  options.writer.write = TierWrite::kAll;
  return options;
}

// A busy machine may take its time.
TierRowOptions Patient() {
  TierRowOptions options;
  options.loads.load_timeout = seconds(60);
  return options;
}

class Node {
 public:
  Node(ValueTier* shared, const TierRowOptions& options, bool disk = true, uint64_t pages = 512,
       const ClusterTenants& tenants = {})
      : store_(NewStore(Pools(pages, control_, tenants))), far_(shared) {
    tiers_ = std::make_unique<TierChain>(store_.get());
    if (disk) {
      local_ = std::make_unique<TierRow>(Patient(), store_.get(), &disk_, TierHooks{});
      tiers_->Add(local_.get());
    }
    remote_ = std::make_unique<TierRow>(options, store_.get(), &far_, TierHooks{},
                                        disk ? &disk_ : nullptr);
    tiers_->Add(remote_.get());
    session_ = std::make_unique<TestSession>(store_.get());
  }

  // Until nothing waits to be written.
  void Settle() const {
    const auto end = Clock::now() + seconds(60);
    while ((local_ != nullptr && local_->counters().waiting != 0) ||
           remote_->counters().waiting != 0) {
      ASSERT_LT(Clock::now(), end) << "a writer does not come to an end";
      std::this_thread::yield();
    }
  }
  void Forget() const { store_->eviction().Evict(false); }
  // Computes a prompt, and forgets it in memory when it is written.
  void Compute(std::span<const int32_t> tokens) {
    TestSequence s = TestSequence::Prompt(session_.get(), "full", tokens);
    Settle();
    ASSERT_TRUE(s.Close().ok());
    Forget();
  }
  // Opens a prompt, computes what is not held, and has it recompressed; how much was held.
  uint32_t Pack(const char* plan, bool* recompressed) {
    const std::vector<int32_t> tokens = Tokens(kPacked);
    const int runs = control_->runs;
    const Result<OpenedSequence> opened = Open(plan, tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(session_.get(), *opened, tokens);
    EXPECT_TRUE(s.Append(std::span(tokens).subspan(opened->held_tokens)).ok());
    EXPECT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
    while (Recompress(store_.get(), s.id()).ok()) {
    }
    s.ExpectIntact();
    EXPECT_EQ(s.Table().extents(), 6u);
    *recompressed = control_->runs != runs;
    Settle();
    EXPECT_TRUE(s.Close().ok());
    return opened->held_tokens;
  }
  // How many tokens an open holds; each of them is right.
  uint32_t Held(std::span<const int32_t> tokens) {
    const Result<OpenedSequence> opened = Open("full", tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(session_.get(), *opened, tokens);
    s.ExpectIntact();
    EXPECT_TRUE(s.Close().ok());
    return opened->held_tokens;
  }
  std::vector<PageKey> Keys(std::span<const int32_t> tokens) {
    return store_->lookups().Lookup(session_->id(), session_->model(), tokens).value().keys;
  }

  Store& store() { return *store_; }
  FarTier& far() { return far_; }
  MemoryValueTier& disk() { return disk_; }
  TierRow& local() { return *local_; }
  TierRow& remote() { return *remote_; }
  TestSession& session() { return *session_; }
  TierRowCounters counters() const { return remote_->counters(); }

 private:
  Result<OpenedSequence> Open(const char* plan, std::span<const int32_t> tokens) {
    std::promise<Result<OpenedSequence>> answer;
    store_->openings().OpenSequence(
        session_->id(), session_->model(), plan, tokens,
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    return answer.get_future().get();
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  MemoryValueTier disk_{kTierBytes};
  FarTier far_;
  std::unique_ptr<TierRow> local_;
  std::unique_ptr<TierRow> remote_;
  std::unique_ptr<TierChain> tiers_;
  std::unique_ptr<TestSession> session_;
};

class RemotePagesTest : public ::testing::Test {
 protected:
  Node& A(const TierRowOptions& options = All(), bool disk = true, uint64_t pages = 512,
          const ClusterTenants& tenants = {}) {
    a_ = std::make_unique<Node>(&shared_, options, disk, pages, tenants);
    return *a_;
  }
  Node& B(const TierRowOptions& options = All(), bool disk = true, uint64_t pages = 512,
          const ClusterTenants& tenants = {}) {
    b_ = std::make_unique<Node>(&shared_, options, disk, pages, tenants);
    return *b_;
  }

  MemoryValueTier shared_{kTierBytes};
  std::unique_ptr<Node> a_, b_;
};

TEST_F(RemotePagesTest, WhatOneComputedTheOtherOpens) {
  A().Compute(Tokens(kPrompt));
  EXPECT_EQ(shared_.Stats().entries, 20u);
  Node& b = B();
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(b.far().probes(), 1u);
  EXPECT_EQ(b.counters().found, 20u);
  EXPECT_EQ(b.counters().read, 20u);
  b.Settle();
  EXPECT_EQ(b.disk().Stats().entries, 20u) << "what came is offered to the disk";
  b.Forget();
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(b.far().probes(), 1u) << "the disk has it now";
  b.Settle();
  EXPECT_EQ(b.counters().written, 0u) << "what came from there does not go back";
  ExpectClean(b.store());
}

TEST_F(RemotePagesTest, WithoutADiskMemoryGoesThereAndComesBack) {
  Node& a = A(All(), false);
  a.Compute(Tokens(kPrompt));
  EXPECT_EQ(shared_.Stats().entries, 20u);
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 320u);
  ExpectClean(a.store());
}

TEST_F(RemotePagesTest, TheDisksPartComesFirst) {
  A().Compute(Tokens(kPrompt));
  Node& b = B();
  b.Compute(Tokens(165));
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 160u) << "too little is missing to ask";
  EXPECT_EQ(b.far().probes(), 0u);
  TierRowOptions options = All();
  options.searches->min_tokens = 100;
  Node& c = B(options);
  c.Compute(Tokens(165));
  EXPECT_EQ(c.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(c.local().counters().read, 10u);
  EXPECT_EQ(c.counters().read, 10u);
  EXPECT_EQ(c.far().probed(), 10u);
}

// A page of the disk's part that is damaged ends the prefix; what lies behind is not read.
TEST_F(RemotePagesTest, AHoleInTheDisksPartEndsThePrefix) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->min_tokens = 100;
  Node& b = B(options);
  b.Compute(Tokens(165));
  b.disk().Damage(TierNameOf(b.Keys(Tokens(165))[3]));
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 48u);
  EXPECT_EQ(b.counters().read, 0u);
}

TEST_F(RemotePagesTest, ALookupIsToldNothingThatDidNotCome) {
  A().Compute(Tokens(kPrompt));
  Node& b = B();
  const auto held = [&b] {
    return b.store()
        .lookups()
        .Lookup(b.session().id(), b.session().model(), Tokens(kPrompt))
        ->held_tokens();
  };
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(held(), 320u);
}

TEST_F(RemotePagesTest, WhatIsNotThereIsAskedForOnce) {
  Node& b = B();
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 0u);
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 0u);
  EXPECT_EQ(b.Held(Tokens(kPrompt + 500)), 0u);
  EXPECT_EQ(b.far().probes(), 1u);
  EXPECT_EQ(b.counters().known_misses, 2u);
  b.remote().Configure(All());
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 0u);
  EXPECT_EQ(b.far().probes(), 2u);
}

// One that was put since is no miss.
TEST_F(RemotePagesTest, WhatIsPutIsNoMissAnyMore) {
  Node& a = A(All(), false);
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 0u);
  a.Compute(Tokens(kPrompt));
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(a.counters().known_misses, 0u);
}

TEST_F(RemotePagesTest, AShortPromptIsNotAskedFor) {
  Node& b = B();
  EXPECT_EQ(b.Held(Tokens(255)), 0u);
  EXPECT_EQ(b.far().probes(), 0u);
}

TEST_F(RemotePagesTest, OnlyWhatIsReusedGoes) {
  TierRowOptions options = Reused();
  ASSERT_EQ(options.writer.write, TierWrite::kReused);
  Node& a = A(options);
  a.Compute(Tokens(kPrompt));
  EXPECT_EQ(shared_.Stats().entries, 0u);
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 320u);
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 20u);
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 320u);
  a.Settle();
  EXPECT_EQ(a.counters().written, 20u) << "what is there is not put again";
}

TEST_F(RemotePagesTest, WhatIsPinnedGoes) {
  Node& a = A(Reused());
  TestSequence s = TestSequence::Prompt(&a.session(), "full", Tokens(kPrompt));
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 0u);
  ASSERT_TRUE(a.store().pins().PinSequence(s.id(), std::chrono::hours(1)).ok());
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 20u);
  EXPECT_EQ(B().Held(Tokens(kPrompt)), 320u);
}

// What left memory before its turn is read from the disk.
TEST_F(RemotePagesTest, WhatLeftMemoryGoesFromTheDisk) {
  Node& a = A(Reused());
  a.Compute(Tokens(kPrompt));
  ASSERT_TRUE(a.store()
                  .pins()
                  .PinPrefix("uid:1", a.session().model(), Tokens(kPrompt), std::chrono::hours(1))
                  .ok());
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 20u);
  EXPECT_EQ(B().Held(Tokens(kPrompt)), 320u);
}

TEST_F(RemotePagesTest, NothingGoesWhenItIsOff) {
  TierRowOptions options = Reused();
  options.writer.write = TierWrite::kOff;
  Node& a = A(options);
  a.Compute(Tokens(kPrompt));
  EXPECT_EQ(a.Held(Tokens(kPrompt)), 320u);
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 0u);
}

TEST_F(RemotePagesTest, AQueueThatIsFullDrops) {
  TierRowOptions options = All();
  options.writer.queue_bytes = 10 * 4096;
  Node& a = A(options, false);
  a.far().HoldPuts();
  TestSequence s = TestSequence::Prompt(&a.session(), "full", Tokens(kPrompt));
  EXPECT_EQ(a.counters().dropped_full, 10u);
  EXPECT_EQ(a.counters().waiting_bytes, 10u * 4096);
  a.far().Release();
  a.Settle();
  EXPECT_EQ(a.counters().waiting_bytes, 0u);
  EXPECT_EQ(shared_.Stats().entries, 10u);
}

TEST_F(RemotePagesTest, GroupsOfAChainHaveAPlaceEach) {
  Node& a = A(All(), true, 1024);
  a.Compute(Tokens(16 * 300 + 1));
  const std::vector<PageKey> keys = a.Keys(Tokens(16 * 300 + 1));
  ASSERT_EQ(keys.size(), 300u);
  for (const size_t i : {0, 255, 256, 299}) {
    const std::string name = TierNameOf(keys[GroupBegin(i)]) + TierNameOf(keys[i]);
    TierProbe probe{name, {}, {}};
    shared_.Probe({&probe, 1}, {{}, {}, [] {}});
    EXPECT_FALSE(probe.sizes.empty()) << "page " << i;
  }
  EXPECT_EQ(B(All(), true, 1024).Held(Tokens(16 * 300 + 1)), 4800u);
}

TEST_F(RemotePagesTest, WhatIsLostEndsThePrefixAndIsNotAskedForAgain) {
  Node& a = A();
  a.Compute(Tokens(kPrompt));
  Node& b = B();
  b.far().Lose(TierNameOf(a.Keys(Tokens(kPrompt))[5]));
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 80u);
  EXPECT_EQ(b.counters().missed, 1u);
  EXPECT_EQ(b.Held(Tokens(kPrompt + 500)), 80u);
  EXPECT_EQ(b.far().probes(), 1u);
}

TEST_F(RemotePagesTest, TheLogSaysWhichTierFailedAtHowMuch) {
  Node& a = A();
  a.Compute(Tokens(kPrompt));
  Node& b = B();
  b.far().Lose(TierNameOf(a.Keys(Tokens(kPrompt))[5]));
  uint64_t last = RecentEvents().Begin(), missed = 0;
  while (const auto event = RecentEvents().Next(last, &missed)) last = event->number;
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 80u);
  std::map<std::string, std::string> told;
  while (const auto event = RecentEvents().Next(last, &missed)) {
    last = event->number;
    if (event->name != "tier_read_failed") continue;
    for (const auto& [key, value, quoted] : event->fields) told[key] = value;
  }
  EXPECT_EQ(told["tier"], "remote");
  EXPECT_EQ(told["values"], "1");
  EXPECT_GE(std::stoul("0" + told["deadline_us"]), 1'000'000u) << "remote.deadline";
  EXPECT_FALSE(told["why"].empty());
}

TEST_F(RemotePagesTest, ATierThatLiesIsAMiss) {
  Node& b = B();
  b.far().LieAbout(4096);
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 0u) << "nothing is there";
  A().Compute(Tokens(kPrompt));
  Node& c = B();
  c.far().LieAbout(8192);
  EXPECT_EQ(c.Held(Tokens(kPrompt)), 0u) << "of another size";
  EXPECT_EQ(c.counters().read, 0u);
  ExpectClean(c.store());
}

TEST_F(RemotePagesTest, ADamagedValueEndsThePrefix) {
  Node& a = A();
  a.Compute(Tokens(kPrompt));
  const std::vector<PageKey> keys = a.Keys(Tokens(kPrompt));
  shared_.Damage(TierNameOf(keys[0]) + TierNameOf(keys[7]));
  EXPECT_EQ(B().Held(Tokens(kPrompt)), 112u);
}

TEST_F(RemotePagesTest, ASlowTierIsWaitedFor) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->deadline = options.searches->deadline_most = seconds(60);
  Node& b = B(options);
  b.far().Delay(milliseconds(20));
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
}

// Probes that hang, then gets that do: neither is waited for beyond the deadline, and what the
// disk has comes all the same.
TEST_F(RemotePagesTest, ATierThatHangsDelaysNobodyBeyondTheDeadline) {
  A().Compute(Tokens(kPrompt + 500));
  TierRowOptions options = All();
  options.searches->deadline = options.searches->deadline_most = seconds(2);
  options.searches->miss_ttl = microseconds(0);
  Node& b = B(options);
  b.Compute(Tokens(165));
  b.far().HoldProbes();
  EXPECT_EQ(b.Held(Tokens(kPrompt + 500)), 160u);
  EXPECT_EQ(b.counters().late_searches, 1u);
  b.far().Release();
  b.far().HoldGets();
  b.Forget();
  EXPECT_EQ(b.Held(Tokens(kPrompt + 500)), 160u);
  EXPECT_EQ(b.counters().late_loads, 1u);
  b.far().Release();
  ExpectClean(b.store());
}

TEST_F(RemotePagesTest, AThousandTimeoutsGiveAllBuffersBack) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->deadline = options.searches->deadline_most = milliseconds(10);
  options.searches->miss_ttl = microseconds(0);
  options.loads.readers = 16;
  Node& b = B(options, false);
  b.far().HoldGets();
  const uint64_t used = UsedBytes(b.store());
  uint64_t late = 0;
  for (int i = 0; i < 1000; ++i) {
    const uint32_t held = b.Held(Tokens(kPrompt));
    EXPECT_EQ(held, 0u);
    late += held == 0;
  }
  EXPECT_EQ(late, 1000u);
  const TierRowCounters c = b.counters();
  EXPECT_GE(c.late_loads + c.late_searches, 1000u);
  EXPECT_GT(c.late_loads, 0u);
  EXPECT_EQ(UsedBytes(b.store()), used);
  EXPECT_GT(b.remote().buffers_in_use(), 0u) << "the tier may still write to them";
  b.far().Release();
  EXPECT_EQ(b.remote().buffers_in_use(), 0u);
  TierRowOptions patient = options;
  patient.searches->deadline = patient.searches->deadline_most = seconds(60);
  b.remote().Configure(patient);
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
  ExpectClean(b.store());
}

TEST_F(RemotePagesTest, AStopWaitsForNobody) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->deadline = options.searches->deadline_most = std::chrono::hours(1);
  Node& b = B(options);
  b.far().HoldProbes();
  std::promise<uint32_t> held;
  b.store().openings().OpenSequence(
      b.session().id(), b.session().model(), "full", Tokens(kPrompt),
      [&](const Result<OpenedSequence>& o) { held.set_value(o->held_tokens); });
  b.remote().Stop();
  EXPECT_EQ(held.get_future().get(), 0u);
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 0u);
}

TEST_F(RemotePagesTest, TheReadRateCutsWhatIsRead) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->read_rate = 8 * 4096;
  Node& b = B(options);
  const uint32_t held = b.Held(Tokens(kPrompt));
  EXPECT_GE(held, 128u);
  EXPECT_LT(held, 320u);
  EXPECT_EQ(b.counters().over_rate, 1u);
}

// Rates are so low that no machine waits for the next page.
TEST_F(RemotePagesTest, ATenantsReadRateCutsWhatItReads) {
  A().Compute(Tokens(kPrompt));
  TierRowOptions options = All();
  options.searches->tenant_read_rates.usual = 4096;
  Node& b = B(options);
  const uint32_t held = b.Held(Tokens(kPrompt));
  EXPECT_GE(held, 16u);
  EXPECT_LT(held, 320u);
  EXPECT_EQ(b.counters().over_rate, 1u);
  EXPECT_EQ(b.counters().over_read_rates, (TenantRates::Refused{{"uid:1", 1}}));
  options.searches->tenant_read_rates.usual = 0;
  options.searches->tenant_read_rates.tenants["uid:2"] = 1;
  Node& c = B(options, false);
  EXPECT_EQ(c.Held(Tokens(kPrompt)), 320u) << "another tenant's rate";
  EXPECT_EQ(c.counters().over_rate, 0u);
  options.searches->tenant_read_rates.tenants["uid:1"] = 4096;
  c.remote().Configure(options);
  c.Forget();
  EXPECT_LT(c.Held(Tokens(kPrompt)), 320u) << "from then on";
}

// What is over the rate does not go, and holds nothing up; what an operator pins has no rate.
TEST_F(RemotePagesTest, ATenantsWriteRateLeavesTheRest) {
  TierRowOptions options = All();
  options.writer.tenant_rates.usual = 4096;
  Node& a = A(options);
  TestSequence s = TestSequence::Prompt(&a.session(), "full", Tokens(kPrompt));
  a.Settle();
  const TierRowCounters c = a.counters();
  EXPECT_GE(c.written, 1u);
  EXPECT_LT(c.written, 20u);
  EXPECT_EQ(c.written + c.dropped_rate, 20u);
  EXPECT_EQ(c.over_write_rates, (TenantRates::Refused{{"uid:1", c.dropped_rate}}));
  EXPECT_EQ(shared_.Stats().entries, c.written);
  ASSERT_TRUE(a.store().pins().PinSequence(s.id(), std::chrono::hours(1)).ok());
  a.Settle();
  EXPECT_EQ(shared_.Stats().entries, 20u);
  EXPECT_EQ(a.counters().dropped_rate, c.dropped_rate);
  // Another tenant's pages go by a rate of its own.
  TestSession other(&a.store(), "uid:2");
  TestSequence theirs = TestSequence::Prompt(&other, "full", Tokens(kPrompt));
  a.Settle();
  EXPECT_GT(shared_.Stats().entries, 20u);
  const uint64_t dropped = a.counters().dropped_rate;
  options.writer.tenant_rates.usual = 0;
  a.remote().Configure(options);
  TestSequence more = TestSequence::Prompt(&other, "full", Tokens(kPrompt, 5000));
  a.Settle();
  EXPECT_EQ(a.counters().dropped_rate, dropped) << "no rate from then on";
}

// The nodes' users are others, and one tenant of the cluster.
TEST_F(RemotePagesTest, UsersOfOneTenantShareAndOthersDoNot) {
  const auto named = [](const char* tenant) {
    ClusterTenants tenants;
    EXPECT_EQ(tenants.Map("uid:1", tenant), "");
    return tenants;
  };
  A(All(), true, 512, named("search")).Compute(Tokens(kPrompt));
  EXPECT_EQ(B(All(), true, 512, named("search")).Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(B(All(), true, 512, named("other")).Held(Tokens(kPrompt)), 0u);
  EXPECT_EQ(B().Held(Tokens(kPrompt)), 0u);
}

// Artefacts go by any policy, with the pages and blocks that they need besides; the next node
// neither computes nor recompresses.
TEST_F(RemotePagesTest, AnArtefactIsFoundWithoutItsRawPages) {
  TierRowOptions options = Reused();
  options.searches->min_tokens = 100;
  bool recompressed = false;
  EXPECT_EQ(A(options).Pack(kKeepsNone, &recompressed), 0u);
  EXPECT_TRUE(recompressed);
  Node& b = B(options);
  EXPECT_EQ(b.Pack(kKeepsNone, &recompressed), 192u);
  EXPECT_FALSE(recompressed);
  EXPECT_EQ(b.store().inspection().Counters().loaded_artefacts, 1u);
  EXPECT_EQ(b.far().probes(), 1u) << "its record is in the same search";
  b.Settle();
  EXPECT_GE(b.disk().Stats().entries, 7u) << "record and extents are offered to the disk";
  ExpectClean(b.store());
}

TEST_F(RemotePagesTest, AnArtefactIsFoundWithItsRawPages) {
  TierRowOptions options = All();
  options.searches->min_tokens = 100;
  bool recompressed = false;
  EXPECT_EQ(A(options).Pack(kKeeps, &recompressed), 0u);
  Node& b = B(options);
  EXPECT_EQ(b.Pack(kKeeps, &recompressed), 192u);
  EXPECT_FALSE(recompressed);
  ExpectClean(b.store());
}

// Bytes over the rate of the last loads against half of what computing takes.
TEST_F(RemotePagesTest, WhatIsComputedSoonerIsNotAskedFor) {
  A().Compute(Tokens(kPrompt));
  Node& b = B();
  const auto asks = [&b](double prefill_rate) {
    TierSearch search;
    search.keys = {{PageKey{1}, PageKey{1}, true}};
    search.tokens = 1 << 20;
    search.bytes = uint64_t{1} << 40;
    search.prefill_rate = prefill_rate;
    search.asked = Clock::now();
    const auto done = std::make_shared<std::promise<void>>();
    search.done = [done](const TierFinds&) { done->set_value(); };
    const bool asked = b.remote().Search(std::move(search));
    if (asked) done->get_future().wait();
    b.remote().Configure(All());
    return asked;
  };
  EXPECT_TRUE(asks(1e12)) << "nothing is known of the tier";
  EXPECT_EQ(b.Held(Tokens(kPrompt)), 320u);
  EXPECT_GT(b.remote().bytes_per_second(), 0);
  EXPECT_TRUE(asks(0)) << "nothing is known of the engine";
  EXPECT_TRUE(asks(1e-9));
  EXPECT_FALSE(asks(1e12));
  EXPECT_EQ(b.counters().not_worth, 1u);
}

}  // namespace
}  // namespace kvstrata::testing
