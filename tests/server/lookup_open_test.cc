// SPDX-License-Identifier: Apache-2.0
// Look-ups against opens: for every plan, what a look-up says of a prompt is what an open of it
// then answers. Random prompts that share prefixes, over two devices and a disk, while pages and
// artefacts come, move, and leave memory or the disk.
//
// KVS_LOOKUP_CASES: cases a plan, 100 without it.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <random>

#include "server/store/store_parts.h"
#include "server/tier/disk/disk_value_tier.h"
#include "server/work/tiers/pin_records.h"
#include "server/work/tiers/tier_row.h"
#include "tests/fakes/copying_codec.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/disk_machine.h"
#include "tests/server/recompress_now.h"

namespace kvstrata {

struct AuditTestPeer {
  // Drops what `drops` says of the pages, index blocks and artefacts that nobody uses.
  static void Drop(Store& store, const std::function<bool()>& drops) {
    Store::Parts& parts = *store.parts_;
    StoreLock lock(parts.books.mu);
    for (const PoolId pool : parts.books.memory.ids()) {
      std::vector<Page*> cached;
      for (Page* page = parts.books.prefix.oldest(pool); page != nullptr; page = page->newer) {
        cached.push_back(page);
      }
      for (Page* page : cached) {
        if (drops()) parts.eviction.EvictPage(page);
      }
      if (drops()) parts.eviction.EvictArtefact(pool);
    }
  }
};

namespace testing {
namespace {

constexpr const char* kPlans[] = {
    "full",
    "window",
    "quest",
    "chess",
    "tokenselect",
    "sentencekv",
    "sekv",
    "mosaickv",
    "bits",
    "quest{group = \"softmax\"}",
    "quest{page = 16, min_tokens = 0}",
    "quest{page = 16, rest = \"mean\"}",
    "bits{min_tokens = \"auto\"}",
    "sentencekv{n_obs = 1}",
    "sentencekv{n_obs = 300}",
    "window{codec = \"packed\", keep_raw = \"no\"}",
    "window{codec = \"packed\", keep_raw = \"host\"}",
    "window{codec = \"packed\", keep_raw = \"auto\"}",
    "quest{codec = \"packed\", keep_raw = \"no\", page = 16}",
    "chess{codec = \"packed\", keep_raw = \"no\"}",
    "bits{codec = \"packed\", keep_raw = \"no\", unit = 48}",
    "mosaickv{keep_raw = \"no\"}",
    "sekv{keep_raw = \"no\"}",
    "sekv{keep_raw = \"no\", min_tokens = \"auto\"}",
    "sekv{keep_raw = \"no\", parameters = \"trained\"}",
    "{selector = \"bucket\", codec = \"lowrank\", keep_raw = \"no\"}",
    "{selector = \"bucket\", codec = \"lowrank\", keep_raw = \"host\"}",
};

constexpr int32_t kLongest = 1400;

int Cases() {
  const char* given = std::getenv("KVS_LOOKUP_CASES");
  return given != nullptr ? std::atoi(given) : 100;
}

class LookupOpen : public ::testing::TestWithParam<const char*> {
 protected:
  LookupOpen() {
    const char* given = std::getenv("KVS_TEST_SEED");
    seed_ = given != nullptr ? static_cast<uint32_t>(std::atoi(given)) : std::random_device()();
    random_.seed(seed_);
    // As safetensors begin: the length of the header, then the header.
    std::ofstream(dir_ / "trained") << std::string_view("\2\0\0\0\0\0\0\0{}", 10);
    disk_options_.directory = dir_ / "tier";
    disk_options_.budget_bytes = 96 << 20;
    disk_options_.segment_bytes = 4 << 20;
    pages_options_.loads.load_timeout =
        std::chrono::seconds(60);  // nobody is late on a busy machine
    constexpr std::array<int32_t, 3> kUnits = {16, 32, 48};
    control_->unit = kUnits[Pick(3)];
    Start();
  }
  ~LookupOpen() override { Stop(); }

  size_t Pick(size_t n) { return random_() % n; }
  bool OneIn(size_t n) { return Pick(n) == 0; }

  void Start() {
    auto disk = DiskTier::Open(disk_options_, SteadyClock::now() + std::chrono::seconds(30));
    ASSERT_TRUE(disk.ok()) << disk.status().ToString();
    disk_ = std::move(*disk);
    values_ = std::make_unique<DiskValueTier>(DiskValueTierOptions{}, disk_.get());
    StoreOptions options = SmallPools(16384, 16384);
    options.arena_bytes = 4 << 20;
    options.parameters_directory = dir_.path();
    options.parse_parameters = [](auto, auto&, auto&, auto&) {
      return Result<ParametersPtr>(std::make_shared<CodecParameters>());
    };
    options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                      ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.codec == CodecKind::kRaw) return nullptr;
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    std::vector<StoreDevice> devices;
    for (const char* name : {"a", "b"}) devices.push_back({name, NewEmulatedDevice()});
    auto store = Store::Create(options, std::move(devices), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    pages_ =
        std::make_unique<TierRow>(pages_options_, store_.get(), values_.get(), values_->Hooks());
    tiers_ = std::make_unique<TierChain>(store_.get());
    tiers_->Add(pages_.get());
    std::promise<size_t> records;
    NoteRecords(store_.get(), values_.get(), pages_.get(), [&](size_t n) { records.set_value(n); });
    records_ += records.get_future().get();
    for (uint32_t i = 0; i < 4; ++i) {
      sessions_.push_back(
          std::make_unique<TestSession>(store_.get(), "uid:1", Transport::kLinked, i % 2));
    }
  }
  void Stop() {
    ExpectClean(*store_);
    open_.clear();
    tiers_.reset();
    pages_.reset();
    sessions_.clear();
    store_.reset();
    values_.reset();
    disk_.reset();
  }
  void SettleDisk() const {
    const auto end = SteadyClock::now() + std::chrono::seconds(30);
    while (pages_->counters().waiting != 0) {
      ASSERT_LT(SteadyClock::now(), end) << "the writer does not come to an end";
      std::this_thread::yield();
    }
  }

  // --- prompts ---

  std::vector<int32_t> NewPrompt() {
    const auto shared = static_cast<int32_t>(Pick(kLongest));
    std::vector<int32_t> tokens = Tokens(shared, static_cast<int32_t>(10'000 * Pick(3)));
    const auto own = Tokens(static_cast<int32_t>(Pick(100)), 100'000 + next_own_);
    next_own_ += 100;
    tokens.insert(tokens.end(), own.begin(), own.end());
    if (tokens.empty()) tokens.push_back(1);
    return tokens;
  }
  // One that was computed, or a part of it, or a new one.
  std::vector<int32_t> SomePrompt() {
    if (prompts_.empty() || OneIn(4)) return NewPrompt();
    std::vector<int32_t> tokens = prompts_[Pick(prompts_.size())];
    if (OneIn(4)) tokens.resize(1 + Pick(tokens.size()));
    if (OneIn(6)) tokens.push_back(7);
    return tokens;
  }

  // --- what happens between two cases ---

  struct Running {
    size_t session;
    TestSequence sequence;
  };
  Result<OpenedSequence> Open(size_t session, std::string_view plan,
                              std::span<const int32_t> tokens) {
    std::promise<Result<OpenedSequence>> answer;
    TestSession& s = *sessions_[session];
    store_->openings().OpenSequence(
        s.id(), s.model(), plan, tokens,
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    return answer.get_future().get();
  }
  // What is not held of an opened prompt, and what its codec makes of it.
  void Compute(size_t session, const OpenedSequence& opened, std::span<const int32_t> tokens) {
    TestSequence s(sessions_[session].get(), opened, tokens);
    ASSERT_TRUE(s.Append(tokens.subspan(opened.held_tokens)).ok());
    if (opened.plan.codec != CodecKind::kRaw && !OneIn(5)) {
      control_->tier = OneIn(2) ? Tier::kHost : Tier::kDevice;
      control_->released_from = OneIn(3) ? static_cast<int32_t>(Pick(300)) : 0;
      control_->released_to = static_cast<int32_t>(OneIn(2) ? Pick(kLongest) : kLongest);
      ASSERT_TRUE(store_->steps().PrefillDone(sessions_[session]->id(), s.id()).ok());
      while (Recompress(store_.get(), s.id()).ok()) {
      }
    }
    s.ExpectIntact();
    if (prompts_.size() == 8) prompts_.erase(prompts_.begin());
    prompts_.emplace_back(tokens.begin(), tokens.end());
    open_.push_back({session, s});
    if (open_.size() > 3 || OneIn(2)) CloseOne();
  }
  void CloseOne() {
    const auto at = open_.begin() + static_cast<ptrdiff_t>(Pick(open_.size()));
    ASSERT_TRUE(at->sequence.Close().ok());
    open_.erase(at);
  }
  void ComputeOne() {
    const size_t session = Pick(sessions_.size());
    const std::vector<int32_t> tokens = SomePrompt();
    const Result<OpenedSequence> opened = Open(session, OneIn(4) ? "full" : GetParam(), tokens);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    Compute(session, *opened, tokens);
  }
  void EraseFromDisk(size_t one_in) {
    std::vector<std::string> keys;
    disk_->ForEach([&](const std::string& key, std::span<const uint64_t>) {
      if (OneIn(one_in)) keys.push_back(key);
    });
    ASSERT_TRUE(disk_->Erase(keys, SteadyClock::now() + std::chrono::seconds(30)).ok());
  }
  void Restart() {
    SettleDisk();
    pages_->Stop();
    ASSERT_TRUE(disk_->Checkpoint(SteadyClock::now() + std::chrono::seconds(30)).ok());
    Stop();
    Start();
  }
  void Disturb() {
    switch (Pick(12)) {
      case 0:
        AuditTestPeer::Drop(*store_, [] { return true; });
        break;
      case 1:
        AuditTestPeer::Drop(*store_, [this] { return OneIn(40); });
        break;
      case 2:
        AuditTestPeer::Drop(*store_, [this] { return OneIn(3); });
        break;
      case 3:
        EraseFromDisk(50);
        break;
      case 4:
        if (OneIn(4)) EraseFromDisk(2);
        break;
      case 5:
      case 6:
        if (!open_.empty()) {
          const Running& r = open_[Pick(open_.size())];
          ASSERT_TRUE(
              store_->moves().Move(r.sequence.id(), OneIn(2) ? Tier::kHost : Tier::kDevice).ok());
        }
        break;
      case 7:
        if (OneIn(4)) Restart();
        break;
      default:
        ComputeOne();
    }
  }

  // --- a case ---

  std::string Describe(size_t opener, std::span<const int32_t> tokens) const {
    return std::string(GetParam()) + ", " + std::to_string(tokens.size()) + " tokens, device " +
           std::to_string(opener % 2) + ", KVS_TEST_SEED=" + std::to_string(seed_);
  }
  void Compare() {
    const size_t looker = Pick(sessions_.size()), opener = Pick(sessions_.size());
    const TestSession& s = *sessions_[looker];
    const std::vector<int32_t> tokens = SomePrompt();
    SCOPED_TRACE(Describe(opener, tokens));
    const LookupPlan open{GetParam(), store_->devices().DeviceName(opener % 2)};
    const StoreCounters before = store_->inspection().Counters();
    const Result<PrefixHit> hit = store_->lookups().Lookup(s.id(), s.model(), tokens, open);
    const Result<PrefixHit> operators =
        store_->lookups().LookupFor("uid:1", s.model(), tokens, open);
    const Result<PrefixHit> raw = store_->lookups().Lookup(s.id(), s.model(), tokens);
    const Result<PrefixHit> full =
        store_->lookups().Lookup(s.id(), s.model(), tokens, {"full", ""});
    ASSERT_TRUE(hit.ok()) << hit.status().ToString();
    ASSERT_TRUE(operators.ok() && raw.ok() && full.ok());
    EXPECT_EQ(operators->pages, hit->pages);
    EXPECT_EQ(raw->pages, full->pages);
    EXPECT_EQ(raw->plan, std::nullopt);
    const Result<OpenedSequence> opened = Open(opener, GetParam(), tokens);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    ASSERT_EQ(hit->held_tokens(), opened->held_tokens);
    ASSERT_EQ(hit->indexed_tokens, opened->indexed_tokens);
    ASSERT_EQ(FormatPlan(hit->plan.value_or(Plan{})), FormatPlan(opened->plan));
    EXPECT_EQ(
        hit->tokens_in(Tier::kDevice) + hit->tokens_in(Tier::kHost) + hit->tokens_in(Tier::kDisk),
        hit->held_tokens());
    const StoreCounters after = store_->inspection().Counters();
    held_ += opened->held_tokens != 0;
    beyond_raw_ += hit->held_tokens() > raw->held_tokens();
    loaded_ += after.loaded_pages != before.loaded_pages;
    replicated_ += after.replicated_pages != before.replicated_pages;
    loaded_artefacts_ += after.loaded_artefacts != before.loaded_artefacts;
    Compute(opener, *opened, tokens);
  }

  const ScratchDir dir_;
  uint32_t seed_ = 0;
  std::mt19937 random_;
  DiskTierOptions disk_options_;
  TierRowOptions pages_options_;
  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<DiskValueTier> values_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TierRow> pages_;
  std::unique_ptr<TierChain> tiers_;
  std::vector<std::unique_ptr<TestSession>> sessions_;
  std::vector<Running> open_;
  std::vector<std::vector<int32_t>> prompts_;
  int32_t next_own_ = 0;
  size_t records_ = 0;
  int held_ = 0, beyond_raw_ = 0, loaded_ = 0, replicated_ = 0, loaded_artefacts_ = 0;
};

TEST_P(LookupOpen, SaysWhatAnOpenFinds) {
  const int cases = Cases();
  for (int i = 0; i < cases; ++i) {
    for (size_t n = 1 + Pick(4); n > 0; --n) ASSERT_NO_FATAL_FAILURE(Disturb());
    SettleDisk();
    ASSERT_NO_FATAL_FAILURE(Compare()) << "case " << i;
    ASSERT_FALSE(HasFailure()) << "case " << i << ", KVS_TEST_SEED=" << seed_;
  }
  std::printf(
      "KVS_TEST_SEED=%u %s: %d cases, %d held, %d beyond raw pages, %d read from disk, %d copied "
      "from the other device, %d on an artefact from disk, %zu records read at starts\n",
      seed_, GetParam(), cases, held_, beyond_raw_, loaded_, replicated_, loaded_artefacts_,
      records_);
  EXPECT_GT(held_, 0);
  EXPECT_GT(loaded_, 0);
  EXPECT_GT(replicated_, 0);
}

INSTANTIATE_TEST_SUITE_P(Plans, LookupOpen, ::testing::ValuesIn(kPlans),
                         [](const auto& p) { return std::to_string(p.index); });

}  // namespace
}  // namespace testing
}  // namespace kvstrata
