// SPDX-License-Identifier: Apache-2.0
// Artefacts and series over a real disk tier: what the next store finds is what was written, bit
// for bit and in its place; what is damaged, missing or of another build is a miss.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "server/store/prompts/artefact_ledger.h"
#include "server/store/store_parts.h"
#include "server/work/tiers/pin_records.h"
#include "tests/fakes/copying_codec.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/disk_machine.h"
#include "tests/server/recompress_now.h"
#include "tests/server/tier/test_queues.h"

namespace kvstrata {

struct AuditTestPeer {
  static Sequence& SequenceOf(Store& store, uint64_t id) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return *store.parts_->catalog.SequenceOf(id);
  }
};

namespace testing {
namespace {

constexpr const char* kKeeps = "window{codec = \"packed\", max_loss = 1, keep_raw = \"host\"}";
constexpr const char* kKeepsNone = "window{codec = \"packed\", max_loss = 1, keep_raw = \"no\"}";
constexpr int32_t kPrompt = 200;  // 12 whole pages, 6 extents, 8 tokens

Deadline Soon() { return SteadyClock::now() + std::chrono::seconds(60); }

class DiskArtefactsTest : public ::testing::Test {
 protected:
  DiskArtefactsTest() {
    options_.directory = dir_ / "tier";
    options_.budget_bytes = 4 << 20;
    options_.segment_bytes = 1 << 20;
    // Nobody is late on a busy machine.
    pages_options_.loads.load_timeout = std::chrono::seconds(60);
  }
  std::unique_ptr<Machine> Start(bool gpu = false) {
    return std::make_unique<Machine>(
        options_, pages_options_, 512, gpu,
        [this](const Plan& plan, const Geometry& geometry,
               ParametersPtr) -> std::unique_ptr<Recompressor> {
          if (plan.codec == CodecKind::kRaw) return nullptr;
          return std::make_unique<CopyingCodec>(control_, geometry);
        },
        value_options_);
  }
  // Opens the prompt and computes what is not held.
  static TestSequence Prompt(const Machine& machine, TestSession* session, const char* plan,
                             int32_t n = kPrompt) {
    const std::vector<int32_t> tokens = Tokens(n);
    const Result<OpenedSequence> opened = machine.Open(*session, plan, tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    TestSequence s(session, *opened, tokens);
    EXPECT_TRUE(s.Append(std::span(tokens).subspan(opened->held_tokens)).ok());
    return s;
  }
  static void Settle(const Machine& machine, const TestSession& session, const TestSequence& s) {
    EXPECT_TRUE(machine.store->steps().PrefillDone(session.id(), s.id()).ok());
    while (Recompress(machine.store.get(), s.id()).ok()) {
    }
    machine.Settle();
  }
  // Leaves the prompt's pages and its artefact on disk.
  void Write(const char* plan, bool gpu = false) {
    const auto machine = Start(gpu);
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, plan);
    machine->Settle();  // before raw pages are released
    Settle(*machine, session, s);
    EXPECT_EQ(machine->store->inspection().Counters().artefacts, 1u);
    EXPECT_EQ(machine->pages->counters().failed, 0u);
    ExpectClean(*machine->store);
  }
  // The next store: whether it found the artefact. What it answers with is right in any case.
  bool Finds(const char* plan) {
    const auto machine = Start();
    TestSession session(machine->store.get());
    const int runs = control_->runs;
    TestSequence s = Prompt(*machine, &session, plan);
    s.ExpectIntact();
    Settle(*machine, session, s);
    s.ExpectIntact();
    EXPECT_EQ(s.Table().extents(), 6u);
    const bool found = machine->store->inspection().Counters().artefact_hits == 1;
    EXPECT_EQ(control_->runs == runs, found);
    EXPECT_TRUE(s.Append(Tokens(40, 900)).ok());
    EXPECT_TRUE(Recompress(machine->store.get(), s.id()).ok());
    s.ExpectIntact();
    ExpectClean(*machine->store);
    EXPECT_TRUE(s.Close().ok());
    machine->Settle();  // the tier has copied the new pages, and holds none
    machine->store->eviction().Evict(false);
    EXPECT_EQ(UsedBytes(*machine->store), 0u) << "a load keeps no page";
    return found;
  }

  // --- what lies on disk, read and changed as nobody but the tier may ---

  struct Value {
    std::string key;
    std::vector<std::vector<std::byte>> buffers;
  };
  std::vector<Value> Values(DiskTier* disk) {
    std::vector<Value> values;
    disk->ForEach([&](const std::string& key, std::span<const uint64_t> sizes) {
      values.push_back({key, {}});
      for (const uint64_t bytes : sizes) values.back().buffers.emplace_back(bytes);
    });
    for (Value& value : values) {
      TierGet get{value.key, {value.buffers.begin(), value.buffers.end()}, nullptr, {}};
      disk->Get({&get, 1}, Soon());
      EXPECT_TRUE(get.status.ok()) << get.status.ToString();
    }
    return values;
  }
  // Replaces each value for which `change` agrees, with sound checksums.
  int Tamper(const std::function<bool(Value*)>& change) {
    auto disk = DiskTier::Open(options_, Soon());
    EXPECT_TRUE(disk.ok());
    int changed = 0;
    for (Value& value : Values(disk->get())) {
      if (!change(&value)) continue;
      ++changed;
      EXPECT_TRUE((*disk)->Erase({&value.key, 1}, Soon()).ok());
      TierPut put{value.key, {value.buffers.begin(), value.buffers.end()}, nullptr, {}};
      (*disk)->Put({&put, 1}, Soon());
      EXPECT_TRUE(put.status.ok()) << put.status.ToString();
    }
    return changed;
  }
  static void EraseAll(DiskTier* disk) {
    std::vector<std::string> keys;
    disk->ForEach([&](const std::string& key, std::span<const uint64_t>) { keys.push_back(key); });
    EXPECT_TRUE(disk->Erase(keys, Soon()).ok());
  }
  // Erases the prompt's first page.
  void EraseFirstPage() {
    const auto machine = Start();
    TestSession session(machine->store.get());
    const PageKey key =
        machine->store->lookups().Lookup(session.id(), session.model(), Tokens(kPrompt))->keys[0];
    const std::string name(key.begin(), key.end());
    EXPECT_TRUE(machine->disk->Erase({&name, 1}, Soon()).ok());
  }
  static bool IsRecord(const Value& value) {
    return ParseRecord(value.buffers.front()).has_value();
  }
  static bool IsExtent(const Value& value) {
    const ExtentView view{
        value.buffers.front().data(), static_cast<int64_t>(value.buffers.front().size()), {}};
    return KindOf(view) == ExtentKind::kRawRows && std::memcmp(view.data, "KVEX", 4) == 0;
  }

  const ScratchDir dir_;
  DiskTierOptions options_;
  TierRowOptions pages_options_;
  DiskValueTierOptions value_options_;
  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
};

TEST_F(DiskArtefactsTest, TheNextStoreNeedsNoWork) {
  Write(kKeeps);
  EXPECT_TRUE(Finds(kKeeps));
  EXPECT_TRUE(Finds(kKeeps));
  EXPECT_FALSE(
      Finds("window{codec = \"packed\", max_loss = 1, keep_raw = \"host\", n_recent = 99}"));
}

TEST_F(DiskArtefactsTest, RawPagesThatThePlanGivesBackAreNotRead) {
  Write(kKeepsNone);
  EXPECT_TRUE(Finds(kKeepsNone));
  const auto machine = Start();
  TestSession session(machine->store.get());
  const std::vector<int32_t> tokens = Tokens(kPrompt);
  const Result<OpenedSequence> opened = machine->Open(session, kKeepsNone, tokens);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->held_tokens, 192u);
  EXPECT_EQ(machine->store->inspection().Counters().loaded_pages, 0u);
  EXPECT_EQ(machine->store->inspection().Counters().loaded_artefacts, 1u);
  TestSequence s(&session, *opened, tokens);
  s.ExpectIntact();
  // It is held for that prompt alone.
  EXPECT_EQ(machine->store->steps().PrefillDone(session.id(), s.id()).reason(), "PREFILL_DONE");
  TestSequence other(&session, *opened, tokens);
  EXPECT_EQ(other.Append(7).reason(), "COMMIT_OTHER_PROMPT");
  ASSERT_TRUE(s.Append(std::span(tokens).subspan(192)).ok());
  s.ExpectIntact();
  ExpectClean(*machine->store);
}

// An artefact of no use is not read: pages that the plan keeps are gone, or the device computes a
// prompt from raw pages alone. A look-up says so before.
TEST_F(DiskArtefactsTest, WithoutTheRestOfItsPromptAnArtefactIsNotRead) {
  const std::vector<int32_t> tokens = Tokens(kPrompt);
  const auto held = [&](bool gpu, uint64_t artefacts) {
    const auto machine = Start(gpu);
    TestSession session(machine->store.get());
    const LookupPlan plan{kKeepsNone, ""};
    std::promise<size_t> records;
    NoteRecords(machine->store.get(), machine->values.get(), machine->pages.get(),
                [&](size_t n) { records.set_value(n); });
    EXPECT_EQ(records.get_future().get(), 1u);
    const Result<PrefixHit> hit =
        machine->store->lookups().Lookup(session.id(), session.model(), tokens, plan);
    const Result<OpenedSequence> opened = machine->Open(session, kKeepsNone, tokens);
    EXPECT_TRUE(hit.ok() && opened.ok());
    EXPECT_EQ(hit->held_tokens(), opened->held_tokens);
    EXPECT_EQ(machine->store->inspection().Counters().loaded_artefacts, artefacts);
    return opened->held_tokens;
  };
  control_->released_from = 64;
  Write(kKeepsNone);
  EXPECT_EQ(held(false, 1), 192u);
  EXPECT_EQ(held(true, 0), 64u);
  EraseFirstPage();
  EXPECT_EQ(held(false, 0), 0u);
  EXPECT_EQ(held(true, 0), 0u);
}

// With codec planes it computes a prompt from its groups, too.
TEST_F(DiskArtefactsTest, AGpuOpensOnAnArtefactThatItsStepsComputeFrom) {
  constexpr const char* kPlanes = "strata{keep_raw = \"no\"}";
  Write(kPlanes);
  const auto machine = Start(true);
  TestSession session(machine->store.get());
  const Result<OpenedSequence> opened = machine->Open(session, kPlanes, Tokens(kPrompt));
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  EXPECT_EQ(opened->held_tokens, 192u);
  EXPECT_EQ(machine->store->inspection().Counters().loaded_artefacts, 1u);
  const Result<SequenceDetail> detail = machine->store->inspection().Show(opened->sequence);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->extents.size(), 6u);
  for (const ExtentInfo& extent : detail->extents) EXPECT_EQ(extent.tier, Tier::kDevice);
  EXPECT_TRUE(detail->pages.front().absent);
  ExpectClean(*machine->store);
}

// Groups as codec planes makes them, whose lower runs come later: bytes and tiers are as written.
TEST_F(DiskArtefactsTest, LowerPlanesComeToAGpuBehindUpperOnes) {
  for (const char* lower : {"device", "host"}) {
    SCOPED_TRACE(lower);
    const ScratchDir dir;
    options_.directory = dir / "tier";
    const std::string plan = "strata{min_tokens = 0, lower = \"" + std::string(lower) +
                             "\", keep_raw = \"no\", open_on = \"upper\"}";
    const auto start = [&] {
      return std::make_unique<Machine>(options_, pages_options_, 512, true, NewRecompressor);
    };
    const auto extents = [](const TestSequence& s) {
      std::vector<std::vector<std::byte>> bytes;
      const shm::TableView table = s.Table();
      for (uint32_t i = 0; i < table.extents(); ++i) {
        const shm::ExtentEntry& e = *table.extent(i);
        EXPECT_EQ(e.flags, 0u);
        const shm::PageEntry place{e.arena, e.flags, e.tier, e.offset};
        bytes.emplace_back(s.At(&place), s.At(&place) + e.bytes);
      }
      return bytes;
    };
    std::vector<std::vector<std::byte>> written;
    {
      const auto machine = start();
      TestSession session(machine->store.get());
      const TestSequence s = Prompt(*machine, &session, plan.c_str());
      EXPECT_TRUE(machine->store->steps().PrefillDone(session.id(), s.id()).ok());
      EXPECT_TRUE(RecompressAll(machine->store.get(), s.id()).ok());
      written = extents(s);
      machine->Settle();
    }
    const auto machine = start();
    TestSession session(machine->store.get());
    const std::vector<int32_t> tokens = Tokens(kPrompt);
    const Result<OpenedSequence> opened = machine->Open(session, plan, tokens);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    const TestSequence s(&session, *opened, tokens);
    EXPECT_EQ(opened->held_tokens, 192u);
    std::promise<Status> settled;
    machine->store->recompression().Settle(
        session.id(), s.id(), [&](const Status& status) { settled.set_value(status); });
    EXPECT_TRUE(settled.get_future().get().ok());
    EXPECT_EQ(extents(s), written);
    EXPECT_EQ(written.size(), 6u);
    const Result<SequenceDetail> detail = machine->store->inspection().Show(s.id());
    for (size_t i = 0; i < detail->extents.size(); ++i) {
      const bool on_host = i % 2 == 1 && plan.find("lower = \"host\"") != plan.npos;
      EXPECT_EQ(detail->extents[i].tier, on_host ? Tier::kHost : Tier::kDevice);
    }
    ExpectClean(*machine->store);
  }
}

TEST_F(DiskArtefactsTest, RawPagesThatThePlanGivesBackAreNotWritten) {
  const auto machine = Start();
  TestSession session(machine->store.get());
  TestSequence s = Prompt(*machine, &session, kKeepsNone);
  machine->Settle();
  EXPECT_EQ(machine->disk->Stats().entries, 0u);
  Settle(*machine, session, s);
  EXPECT_EQ(machine->disk->Stats().entries, 7u) << "the record and its extents";
  // What is not released is written when the sequence closes.
  const std::vector<int32_t> tokens = Tokens(kPrompt, 5000);
  const Result<OpenedSequence> opened = machine->Open(session, kKeepsNone, tokens);
  ASSERT_TRUE(opened.ok());
  TestSequence other(&session, *opened, tokens);
  ASSERT_TRUE(other.Append(tokens).ok());
  machine->Settle();
  EXPECT_EQ(machine->disk->Stats().entries, 7u);
  ASSERT_TRUE(other.Close().ok());
  machine->Settle();
  EXPECT_EQ(machine->disk->Stats().entries, 7u + 12);
}

TEST_F(DiskArtefactsTest, APinOfASequenceKeepsItsArtefact) {
  options_.budget_bytes = (2 << 20) + (128 << 10);
  {
    const auto machine = Start();
    TestSession session(machine->store.get());
    TestSequence s = Prompt(*machine, &session, kKeeps);
    Settle(*machine, session, s);
    const Result<PinInfo> made = machine->store->pins().PinSequence(s.id(), std::chrono::hours(1));
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ(made->pin.artefact.size(), 7u);
    ASSERT_TRUE(s.Close().ok());
    machine->store->eviction().Evict(false);
    EXPECT_EQ(machine->store->inspection().Counters().artefacts, 1u);
    ExpectClean(*machine->store);
  }
  const auto machine = Start();
  const std::vector<PrefixPin> pins = ReadPins(machine->values.get(), Soon());
  ASSERT_EQ(pins.size(), 1u);
  ASSERT_TRUE(machine->pages->Pin(pins[0]).ok());
  machine->store->pins().RestorePins(pins);
  TestSession session(machine->store.get());
  for (int32_t i = 1; i <= 8; ++i) {
    TestSequence s = TestSequence::Prompt(&session, "full", Tokens(50 * 16, i * 10'000));
    ASSERT_TRUE(s.Close().ok());
    machine->Settle();
  }
  EXPECT_GT(machine->values->Stats().evicted, 50u);
  for (const PageKey& key : pins[0].artefact) EXPECT_TRUE(machine->pages->Holds(key));
  TestSequence s = Prompt(*machine, &session, kKeeps);
  EXPECT_EQ(machine->store->inspection().Counters().loaded_artefacts, 1u);
  ASSERT_TRUE(s.Close().ok());
  ASSERT_TRUE(machine->store->pins().RemovePin(pins[0].id).ok());
  machine->store->eviction().Evict(false);
  EXPECT_EQ(machine->store->inspection().Counters().artefacts, 0u);
  ExpectClean(*machine->store);
}

// Pages behind those that were released too: without them the artefact would be of no use.
TEST_F(DiskArtefactsTest, APinOfASequenceKeepsWhatAnOpenNeeds) {
  control_->released_from = 32;
  control_->released_to = 96;
  for (const bool first_too : {false, true}) {
    if (first_too) control_->released_from = 0;
    const size_t released = first_too ? 6 : 4;
    const auto machine = Start();
    TestSession session(machine->store.get());
    const int32_t n = first_too ? kPrompt - 1 : kPrompt;  // another artefact
    TestSequence s = Prompt(*machine, &session, kKeepsNone, n);
    Settle(*machine, session, s);
    const Result<PinInfo> made = machine->store->pins().PinSequence(s.id(), std::chrono::hours(1));
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ(made->pin.pages.size(), 12 - released);
    EXPECT_EQ(made->device_pages, 12 - released);
    ASSERT_TRUE(s.Close().ok());
    machine->Settle();
    EraseAll(machine->disk.get());
    machine->store->eviction().Evict(false);
    EXPECT_EQ(machine->Open(session, kKeepsNone, Tokens(n))->held_tokens, 192u);
    ASSERT_TRUE(machine->store->pins().RemovePin(made->pin.id).ok());
    ExpectClean(*machine->store);
  }
}

TEST_F(DiskArtefactsTest, ExtentsComeBackToTheirTiers) {
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    control_->tier = tier;
    const ScratchDir dir;
    options_.directory = dir / "tier";
    Write(kKeepsNone);
    const auto machine = Start();
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, kKeepsNone);
    const Result<SequenceDetail> detail = machine->store->inspection().Show(s.id());
    ASSERT_EQ(detail->extents.size(), 6u);
    for (const ExtentInfo& extent : detail->extents) {
      EXPECT_EQ(extent.tier, tier);
    }
  }
}

TEST_F(DiskArtefactsTest, SeriesComeWithTheirPages) {
  const std::vector<float> nats = {1, 2, 0.5f, 7, 8};
  const std::vector<uint8_t> ends = {0, 1, 1};
  Series want;
  {
    const auto machine = Start();
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, "full");
    machine->Settle();  // pages are on disk without a series
    const auto report = [&](uint32_t first, size_t n, const float* surprisal, const float* entropy,
                            const uint8_t* boundary) {
      return machine->store->steps().Report(session.id(), s.id(), first, static_cast<uint32_t>(n),
                                            surprisal, entropy, boundary);
    };
    ASSERT_TRUE(report(0, 5, nats.data(), nullptr, nullptr).ok());
    machine->Settle();
    ASSERT_TRUE(report(14, 5, nats.data(), nats.data(), nullptr).ok());
    ASSERT_TRUE(report(30, 3, nullptr, nullptr, ends.data()).ok());
    machine->Settle();
    const uint64_t written = machine->pages->counters().written;
    ASSERT_TRUE(report(30, 3, nullptr, nullptr, ends.data()).ok());
    machine->Settle();
    EXPECT_EQ(machine->pages->counters().written, written) << "nothing new, nothing written";
    want = AuditTestPeer::SequenceOf(*machine->store, s.id()).series.Slice(0, 192);
    EXPECT_EQ(want.boundary.size(), 33u);
  }
  const auto machine = Start();
  TestSession session(machine->store.get());
  const Result<OpenedSequence> opened = machine->Open(session, "full", Tokens(kPrompt));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->held_tokens, 192u);
  EXPECT_EQ(opened->surprisal_tokens, 5u);
  const Series& got = AuditTestPeer::SequenceOf(*machine->store, opened->sequence).series;
  EXPECT_TRUE(SameSeries(got, want));
  EXPECT_TRUE(std::isnan(got.surprisal.at(9)));
}

TEST_F(DiskArtefactsTest, APageWithoutItsWholeSeriesIsNoPage) {
  {
    const auto machine = Start();
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, "full");
    const std::vector<float> nats(kPrompt, 1.0f);
    ASSERT_TRUE(machine->store->steps()
                    .Report(session.id(), s.id(), 0, kPrompt, nats.data(), nullptr, nullptr)
                    .ok());
    machine->Settle();
  }
  int seen = 0;
  EXPECT_EQ(Tamper([&](Value* value) {
              if (value->buffers.size() != 2 || ++seen != 3) return false;
              value->buffers[1].pop_back();
              return true;
            }),
            1);
  const auto machine = Start();
  TestSession session(machine->store.get());
  const Result<OpenedSequence> opened = machine->Open(session, "full", Tokens(kPrompt));
  ASSERT_TRUE(opened.ok());
  EXPECT_LT(opened->held_tokens, 192u);
}

// Damage that no slot's checksum finds: of another build, of another layout, by another hand.
TEST_F(DiskArtefactsTest, WhatIsNotTheRecordsIsAMiss) {
  const auto shift = [](Value* value, size_t at) {
    value->buffers.front().at(at) ^= std::byte{1};
    return true;
  };
  const std::function<bool(Value*)> changes[] = {
      [&](Value* v) { return IsExtent(*v) && shift(v, 64 + 128 * 3); },  // a row
      [&](Value* v) { return IsExtent(*v) && shift(v, 48); },            // the extent's checksum
      [&](Value* v) { return IsExtent(*v) && shift(v, 8); },             // its first token
      [&](Value* v) { return IsExtent(*v) && shift(v, 16); },            // its layers
      [&](Value* v) { return IsRecord(*v) && shift(v, 8); },             // the record's version
      [&](Value* v) { return IsRecord(*v) && shift(v, 12); },            // its prompt
      [&](Value* v) { return IsRecord(*v) && shift(v, 16); },            // its extents
      [&](Value* v) { return IsRecord(*v) && shift(v, 32 + 8); },        // an extent's checksum
      [&](Value* v) { return IsRecord(*v) && shift(v, 32 + 24); },       // nothing wrong: a tier
      [&](Value* v) {
        if (!IsRecord(*v)) return false;
        v->buffers.front().pop_back();
        return true;
      },
  };
  for (const char* plan : {kKeeps, kKeepsNone}) {
    const ScratchDir dir;
    options_.directory = dir / "tier";
    Write(plan);
    for (size_t i = 0; i < std::size(changes); ++i) {
      ASSERT_GE(Tamper(changes[i]), 1) << plan << ", change " << i;
      EXPECT_EQ(Finds(plan), i == 8) << plan << ", change " << i;
      EXPECT_TRUE(Finds(plan)) << plan << ", change " << i << ": it was written again";
    }
  }
}

TEST_F(DiskArtefactsTest, APartThatIsNotWrittenLeavesNoRecord) {
  for (const int error : {ENOSPC, EIO}) {
    const ScratchDir dir;
    options_.directory = dir / "tier";
    FaultPlan plan;
    options_.new_queue = [&plan](uint32_t depth) {
      return IoQueueChoice{NewFaultyQueue(NewPreadQueue(depth), depth, &plan), OkStatus()};
    };
    std::atomic<int> extents{0};
    const auto machine = Start();
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, kKeeps);
    machine->Settle();
    plan.Set([&](const IoRequest& r) -> std::optional<IoFault> {
      const bool extent = r.op == IoRequest::Op::kWrite && r.bytes > 8192 &&
                          std::memcmp(r.data + 4096, "KVEX", 4) == 0;
      if (!extent || ++extents != 3) return std::nullopt;
      return IoFault{IoFault::Kind::kFail, static_cast<uint32_t>(error)};
    });
    Settle(*machine, session, s);
    EXPECT_EQ(extents, 6);
    EXPECT_EQ(machine->pages->counters().failed, 1u);
    for (const Value& value : Values(machine->disk.get())) EXPECT_FALSE(IsRecord(value));
    plan.Set(nullptr);
    options_.new_queue = NewIoQueue;
  }
}

TEST_F(DiskArtefactsTest, AFullDiskLosesArtefactsAndNothingElse) {
  options_.budget_bytes = (1 << 20) + (64 << 10);
  options_.segment_bytes = 256 << 10;
  const auto machine = Start();
  TestSession session(machine->store.get());
  for (int32_t n = 100; n < 400; n += 20) {
    TestSequence s = Prompt(*machine, &session, kKeeps, n);
    Settle(*machine, session, s);
    s.ExpectIntact();
    ASSERT_TRUE(s.Close().ok());
  }
  EXPECT_GT(machine->values->Stats().evicted, 0u);
  ExpectClean(*machine->store);
}

// --- what a disk does --------------------------------------------------------------------------

// What was written when the machine stopped: `cut` events, without those that `lost` names, the
// last one torn at a sector.
void Replay(const IoHistory& history, const std::string& from, const std::string& to, size_t cut,
            bool torn, const std::function<bool()>& lost) {
  std::filesystem::remove_all(to);
  std::filesystem::copy(from, to);
  const auto file = [&to](uint32_t number) {
    const uint32_t segments = 3;  // 1 MiB each, in 4 MiB with two checkpoints
    return to + (number < segments ? "/segment." + std::to_string(number)
                                   : "/checkpoint." + std::to_string(number - segments));
  };
  for (uint32_t i = 0; i < 5; ++i) {
    const auto bytes = std::filesystem::file_size(file(i));
    std::filesystem::resize_file(file(i), 0);
    std::filesystem::resize_file(file(i), bytes);
  }
  for (size_t i = 0; i < cut; ++i) {
    const IoEvent& event = history[i];
    if (event.op != IoRequest::Op::kWrite || lost()) continue;
    const size_t bytes =
        torn && i + 1 == cut ? event.bytes.size() / 1024 * 512 : event.bytes.size();
    std::fstream out(file(event.file), std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(event.offset));
    out.write(reinterpret_cast<const char*>(event.bytes.data()),
              static_cast<std::streamsize>(bytes));
  }
}

// Pages, their series in two reports, an artefact, and another build of it: after a crash at any
// write each of them is there whole or not at all, and the prompt is answered rightly.
TEST_F(DiskArtefactsTest, ACrashAtAnyWriteLeavesAllOrNothing) {
  IoHistory history;
  const std::vector<float> nats(kPrompt, 1.5f);
  {
    options_.new_queue = [&history](uint32_t) {
      return IoQueueChoice{NewRecordingQueue(NewInlineQueue(), &history), OkStatus()};
    };
    const auto machine = Start();
    TestSession session(machine->store.get());
    const auto write = [&](int32_t unit, uint32_t reported) {
      control_->unit = unit;
      // As a store without a disk opens: it builds the artefact again.
      TestSequence s = TestSequence::Prompt(&session, kKeeps, Tokens(kPrompt));
      machine->Settle();
      ASSERT_TRUE(machine->store->steps()
                      .Report(session.id(), s.id(), 0, reported, nats.data(), nullptr, nullptr)
                      .ok());
      Settle(*machine, session, s);
      ASSERT_TRUE(s.Close().ok());
      machine->store->eviction().Evict(false);
    };
    write(16, 40);
    write(32, kPrompt);
    options_.new_queue = NewIoQueue;
  }
  const std::string recorded = options_.directory;
  const ScratchDir replays;
  options_.directory = replays.path() + "/tier";
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  int states = 0, hits = 0, series = 0;
  for (size_t cut = 0; cut <= history.size(); ++cut) {
    for (int kind = 0; kind < 3; ++kind) {  // killed; torn; power lost
      Replay(history, recorded, options_.directory, cut, kind == 1,
             [&] { return kind == 2 && random() % 4 == 0; });
      const auto machine = Start();
      TestSession session(machine->store.get());
      TestSequence s = Prompt(*machine, &session, kKeeps);
      s.ExpectIntact();
      const Series& seen = AuditTestPeer::SequenceOf(*machine->store, s.id()).series;
      for (const float value : seen.surprisal) ASSERT_TRUE(value == 1.5f || std::isnan(value));
      Settle(*machine, session, s);
      s.ExpectIntact();
      ASSERT_TRUE(s.Table().extents() == 6 || s.Table().extents() == 12) << s.Table().extents();
      ExpectClean(*machine->store);
      ASSERT_FALSE(HasFailure()) << "cut " << cut << " of " << history.size() << ", kind " << kind;
      ++states;
      hits += static_cast<int>(machine->store->inspection().Counters().artefact_hits);
      series += static_cast<int>(seen.surprisal.size() == 192);
    }
  }
  std::printf("seed %u: %d states, %d with the artefact, %d with all of the series\n", seed, states,
              hits, series);
  EXPECT_GT(hits, 0);
  EXPECT_LT(hits, states);
  EXPECT_GT(series, 0);
}

TEST_F(DiskArtefactsTest, NoFlippedBitIsServed) {
  Write(kKeeps);
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::printf("seed %u\n", seed);
  for (int i = 0; i < 48; ++i) {
    std::vector<DiskSlot> slots = DiskSlots(options_.directory);
    std::erase_if(slots, [](const DiskSlot& slot) {
      return !slot.payload.starts_with("KVEX") && slot.payload != "KVSARTF1";
    });
    ASSERT_EQ(slots.size(), 7u);
    const DiskSlot& slot = slots[random() % slots.size()];
    // Only so many bytes of the record's one block are its own.
    const uint32_t payload = slot.payload == "KVSARTF1" ? 200 : 8192;
    FlipBit(slot, random() % (4096 + payload), static_cast<int>(random() % 8));
    EXPECT_FALSE(Finds(kKeeps)) << "flip " << i;
  }
  EXPECT_TRUE(Finds(kKeeps));
}

TEST_F(DiskArtefactsTest, AScrubErasesPartsWithoutTheirRecord) {
  Write(kKeeps);
  const auto orphans = [](const Machine& machine) {
    std::promise<Status> end;
    ScrubProgress last;
    TierScrub scrub;
    scrub.progress = [&last](const ScrubProgress& p) {
      last = p;
      return true;
    };
    scrub.done = [&end](const Status& why) { end.set_value(why); };
    EXPECT_TRUE(machine.pages->scrubs().Begin(std::move(scrub)).ok());
    EXPECT_TRUE(end.get_future().get().ok());
    return last.orphans;
  };
  {
    const auto machine = Start();
    const uint64_t entries = machine->disk->Stats().entries;
    EXPECT_EQ(orphans(*machine), 0u);
    EXPECT_EQ(machine->disk->Stats().entries, entries);
    for (const Value& value : Values(machine->disk.get())) {
      if (!IsRecord(value)) continue;
      ASSERT_TRUE(machine->disk->Erase({&value.key, 1}, Soon()).ok());
    }
    EXPECT_EQ(orphans(*machine), 6u);
    EXPECT_EQ(machine->disk->Stats().entries, entries - 7);
    // What memory has is on its way, or there.
    TestSession session(machine->store.get());
    const TestSequence s = Prompt(*machine, &session, kKeeps);
    Settle(*machine, session, s);
    EXPECT_EQ(orphans(*machine), 0u);
    EXPECT_EQ(machine->disk->Stats().entries, entries);
  }
  EXPECT_TRUE(Finds(kKeeps));
}

TEST_F(DiskArtefactsTest, CheckpointsWithoutAStop) {
  value_options_.checkpoint_interval = std::chrono::milliseconds(1);
  {
    const auto machine = Start();
    TestSession session(machine->store.get());
    Prompt(*machine, &session, "full");
    const auto end = Soon();
    while (machine->values->checkpoints() == 0 || machine->pages->counters().waiting != 0) {
      ASSERT_LT(SteadyClock::now(), end);
      std::this_thread::yield();
    }
  }
  const auto disk = DiskTier::Open(options_, Soon());
  ASSERT_TRUE(disk.ok());
  EXPECT_EQ((*disk)->Stats().entries, 12u);
  EXPECT_LE((*disk)->Stats().scanned_segments, 1u) << "at most the one that was written since";
}

}  // namespace
}  // namespace testing
}  // namespace kvstrata
