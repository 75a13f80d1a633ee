// SPDX-License-Identifier: Apache-2.0
// Pages between a store and a disk tier in one process: what was sealed is found by the next store,
// and whatever goes wrong on the way ends a prefix, never a call, and never wrongly.
#include <gtest/gtest.h>

#include <future>

#include "server/tier/blocking_calls.h"
#include "server/work/tiers/pin_records.h"
#include "server/work/tiers/tier_row.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/disk_machine.h"
#include "tests/server/tier/test_queues.h"

namespace kvstrata::testing {
namespace {

using std::chrono::seconds;

constexpr const char* kQuest = "quest{min_tokens = 0}";

class TierPagesTest : public ::testing::Test {
 protected:
  TierPagesTest() {
    options_.directory = dir_ / "tier";
    options_.budget_bytes = 4 << 20;
    options_.segment_bytes = 1 << 20;
  }
  // Leaves `n` tokens on disk.
  void Write(std::string_view plan, int32_t n, bool gpu = false) {
    const Machine machine(options_, {}, 256, gpu);
    TestSession session(machine.store.get());
    TestSequence s = TestSequence::Prompt(&session, plan, Tokens(n));
    EXPECT_TRUE(s.Append(-1).ok());  // completes the index of what is before it
    machine.Settle();
    EXPECT_GT(machine.pages->counters().written, 0u);
    EXPECT_EQ(machine.pages->counters().failed, 0u);
    ExpectClean(*machine.store);
  }
  // Opens the same tokens in a new store; held tokens. What is held is right, and the rest can be
  // computed behind it.
  uint32_t HeldAfterwards(const Machine& machine, std::string_view plan, int32_t n) {
    TestSession session(machine.store.get());
    const std::vector<int32_t> tokens = Tokens(n);
    const Result<OpenedSequence> opened = machine.Open(session, plan, tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(&session, *opened, tokens);
    s.ExpectIntact();
    ExpectClean(*machine.store);
    indexed_ = opened->indexed_tokens;
    const Status rest = s.Append(std::span(tokens).subspan(opened->held_tokens));
    EXPECT_TRUE(rest.ok()) << rest.ToString();
    s.ExpectIntact();
    EXPECT_TRUE(s.Close().ok());
    ExpectClean(*machine.store);
    machine.store->sessions().EndSession(session.id(), SessionEnd::kDied);
    ExpectClean(*machine.store);
    return opened->held_tokens;
  }
  const ScratchDir dir_;
  DiskTierOptions options_;
  uint32_t indexed_ = 0;
};

TEST(TierBuffers, AreOfTheirMemoryWhileItHasRoomAndElseOfTheHeap) {
  auto buffers = std::make_unique<TierBuffers>(64 << 10);
  const std::byte* const begin = buffers->memory().get();
  const auto inside = [&](const std::shared_ptr<std::byte>& p) {
    return p.get() >= begin + kValueAlignment && p.get() < begin + buffers->bytes();
  };
  std::shared_ptr<std::byte> a = buffers->Take(28 << 10), b = buffers->Take(28 << 10);
  EXPECT_TRUE(inside(a) && inside(b));
  const std::shared_ptr<std::byte> c = buffers->Take(4 << 10);
  EXPECT_FALSE(inside(c));
  for (const auto& p : {a, b, c}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.get()) % kValueAlignment, 0u);
    p.get()[-1] = std::byte{1};  // the header's
  }
  a.reset();
  std::shared_ptr<std::byte> d = buffers->Take(16 << 10);
  EXPECT_TRUE(inside(d));
  std::memset(d.get(), 7, 16 << 10);
  buffers.reset();
  EXPECT_EQ(d.get()[100], std::byte{7}) << "it outlives them";
}

TEST_F(TierPagesTest, TheNextStoreHoldsWhatWasSealed) {
  Write("full", 325);
  const Machine machine(options_);
  EXPECT_EQ(HeldAfterwards(machine, "full", 325), 320u);
  EXPECT_EQ(machine.store->inspection().Counters().loaded_pages, 20u);
  EXPECT_EQ(machine.pages->counters().read, 20u);
  // Now they are in memory.
  EXPECT_EQ(HeldAfterwards(machine, "full", 325), 320u);
  EXPECT_EQ(machine.pages->counters().read, 20u);
  machine.store->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*machine.store), 0u) << "a load keeps no page";
}

TEST_F(TierPagesTest, IndexBlocksComeWithTheirPages) {
  Write(kQuest, 40 * 16 + 1);
  const Machine machine(options_);
  EXPECT_EQ(HeldAfterwards(machine, kQuest, 40 * 16 + 1), 640u);
  EXPECT_GT(indexed_, 0u);
}

TEST_F(TierPagesTest, ALeaseReadsWhatItHolds) {
  Write(kQuest, 641);
  const Machine machine(options_);
  const TestSession session(machine.store.get());
  std::promise<Result<PrefixHit>> answer;
  machine.store->leases().LookupLeased(
      session.id(), session.model(), Tokens(641), {kQuest, ""}, std::chrono::seconds(30),
      [&](const Result<PrefixHit>& hit) { answer.set_value(hit); });
  const Result<PrefixHit> hit = answer.get_future().get();
  ASSERT_TRUE(hit.ok()) << hit.status().ToString();
  EXPECT_EQ(hit->tokens_in(Tier::kDevice), 640u);
  const uint64_t read = machine.pages->counters().read;
  EXPECT_GT(read, 0u);
  machine.store->eviction().Evict(false);
  EXPECT_EQ(HeldAfterwards(machine, kQuest, 641), 640u);
  EXPECT_EQ(indexed_, hit->indexed_tokens);
  EXPECT_EQ(machine.pages->counters().read, read) << "an open finds it in memory";
}

TEST_F(TierPagesTest, PagesOfAGpuGoTheSameWay) {
  Write("full", 100, /*gpu=*/true);
  const Machine machine(options_, {}, 256, /*gpu=*/true);
  EXPECT_EQ(HeldAfterwards(machine, "full", 100), 96u);
}

TEST_F(TierPagesTest, AnotherTenantFindsNothing) {
  Write("full", 100);
  const Machine machine(options_);
  const TestSession other(machine.store.get(), "uid:2");
  const Result<OpenedSequence> opened = machine.Open(other, "full", Tokens(100));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->held_tokens, 0u);
}

TEST_F(TierPagesTest, ADamagedPageEndsThePrefix) {
  Write("full", 200);
  FlipByte(DiskSlots(options_.directory).at(7));
  const Machine machine(options_);
  EXPECT_EQ(HeldAfterwards(machine, "full", 200), 7 * 16u);
  EXPECT_EQ(machine.disk->Stats().corrupt, 1u);
  machine.Settle();  // it was computed and written again
  EXPECT_EQ(machine.pages->counters().written, 1u);
}

TEST_F(TierPagesTest, MemoryAndDiskMakeOnePrefix) {
  Write("full", 400);
  const Machine machine(options_);
  EXPECT_EQ(HeldAfterwards(machine, "full", 101), 96u);
  EXPECT_EQ(HeldAfterwards(machine, "full", 400), 384u);
  EXPECT_EQ(machine.store->inspection().Counters().loaded_pages, 24u) << "none twice";
  machine.store->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*machine.store), 0u) << "a load keeps no page";
}

TEST_F(TierPagesTest, WithoutMemoryThePrefixIsShorterAndTheOpenFailsAsBefore) {
  Write("full", 400);  // 25 pages
  const Machine machine(options_, {}, 32);
  TestSession session(machine.store.get());
  // Somebody needs nearly all of it.
  TestSequence other = TestSequence::Prompt(&session, "full", Tokens(80 * 16, 100000));
  const Result<OpenedSequence> opened = machine.Open(session, "full", Tokens(400));
  EXPECT_EQ(opened.status().reason(), "POOL_EXHAUSTED");
  ExpectClean(*machine.store);
  ASSERT_TRUE(other.Close().ok());
  EXPECT_EQ(HeldAfterwards(machine, "full", 400), 384u);
}

TEST_F(TierPagesTest, AFullQueueDropsAndCounts) {
  TierRowOptions options;
  options.writer.queue = 1;
  const Machine machine(options_, options);
  TestSession session(machine.store.get());
  // One commit offers all of them, faster than the writer, who needs the store's lock, takes them.
  TestSequence::Prompt(&session, "full", Tokens(200 * 16));
  machine.Settle();
  const TierRowCounters counters = machine.pages->counters();
  EXPECT_GE(counters.dropped(), 150u);
  EXPECT_EQ(counters.dropped() + counters.written + counters.gone, 200u);
  ExpectClean(*machine.store);
}

TEST_F(TierPagesTest, AFullDiskGivesUpOldPages) {
  options_.budget_bytes = (1 << 20) + (128 << 10);  // room for 127 pages
  const Machine machine(options_);
  TestSession session(machine.store.get());
  for (int i = 0; i < 4; ++i) {
    TestSequence s = TestSequence::Prompt(&session, "full", Tokens(50 * 16, i * 10000));
    ASSERT_TRUE(s.Close().ok());
    machine.Settle();
  }
  const TierRowCounters counters = machine.pages->counters();
  EXPECT_EQ(counters.failed, 0u);
  EXPECT_EQ(counters.written, 200u);
  EXPECT_GT(machine.values->Stats().evicted, 60u);
}

TEST_F(TierPagesTest, AFullDiskKeepsWhatIsPinnedAlsoAfterARestart) {
  options_.budget_bytes = (1 << 20) + (128 << 10);  // room for 127 pages
  const auto flood = [](const Machine& machine, TestSession* session, int32_t first) {
    for (int32_t i = 0; i < 4; ++i) {
      TestSequence s = TestSequence::Prompt(session, "full", Tokens(50 * 16, first + i * 1000));
      ASSERT_TRUE(s.Close().ok());
      machine.Settle();
    }
    machine.store->eviction().Evict(false);
  };
  {
    const Machine machine(options_);
    TestSession session(machine.store.get());
    TestSequence s = TestSequence::Prompt(&session, "full", Tokens(50 * 16));
    machine.Settle();
    const Result<PinInfo> pin = machine.store->pins().PinSequence(s.id(), std::chrono::hours(1));
    ASSERT_TRUE(pin.ok()) << pin.status().ToString();
    const Result<PinInfo> over =
        machine.store->pins().PinSequence(s.id(), std::chrono::milliseconds(1));
    ASSERT_TRUE(over.ok());
    ASSERT_TRUE(s.Close().ok());
    flood(machine, &session, 100000);
  }
  const Machine machine(options_);
  const std::vector<PrefixPin> pins =
      ReadPins(machine.values.get(), SteadyClock::now() + seconds(30));
  ASSERT_EQ(pins.size(), 2u);
  EXPECT_EQ(pins[0].tokens(), 800u);
  EXPECT_EQ(pins[0].tenant, "uid:1");
  EXPECT_EQ(pins[0].model_name, "small");
  EXPECT_GT(pins[0].expires, SteadyClock::now() + std::chrono::minutes(50));
  EXPECT_LE(pins[1].expires, SteadyClock::now()) << "its time went on";
  ASSERT_TRUE(machine.pages->Pin(pins[0]).ok());
  ASSERT_TRUE(ErasePin(machine.values.get(), pins[1].id, SteadyClock::now() + seconds(30)).ok());
  machine.store->pins().RestorePins({pins[0]});
  TestSession session(machine.store.get());
  flood(machine, &session, 200000);
  EXPECT_GT(machine.values->Stats().evicted, 50u);
  const PrefixHit hit =
      machine.store->lookups().Lookup(session.id(), session.model(), Tokens(50 * 16 + 1)).value();
  EXPECT_EQ(hit.held_tokens(), 800u);
  EXPECT_EQ(hit.tokens_in(Tier::kDisk), 800u);
  EXPECT_EQ(ReadPins(machine.values.get(), SteadyClock::now() + seconds(30)).size(), 1u);
  ASSERT_TRUE(machine.store->pins().RemovePin(pins[0].id).ok());
  EXPECT_TRUE(ReadPins(machine.values.get(), SteadyClock::now() + seconds(30)).empty());
  flood(machine, &session, 300000);
  EXPECT_LT(machine.store->lookups()
                .Lookup(session.id(), session.model(), Tokens(50 * 16 + 1))
                ->held_tokens(),
            800u);
  ExpectClean(*machine.store);
}

TEST_F(TierPagesTest, AnEvictionSaysWhatIsOnDiskToo) {
  const Machine machine(options_);
  TestSession session(machine.store.get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(160));
  machine.Settle();
  ASSERT_TRUE(s.Close().ok());
  machine.pages->Stop();
  TestSequence later = TestSequence::Prompt(&session, "full", Tokens(48, 5000));
  ASSERT_TRUE(later.Close().ok());
  const EvictResult dry = machine.store->eviction().Evict(true);
  EXPECT_EQ(dry.pages(), 13u);
  EXPECT_EQ(dry.tiers[0].stored_pages, 10u);
  EXPECT_EQ(machine.store->inspection().Counters().evicted_pages, 0u);
  machine.store->eviction().Evict(false);
  EXPECT_EQ(machine.store->inspection().Counters().evicted_pages, 13u);
  EXPECT_EQ(machine.store->inspection().Counters().evicted_stored_pages, 10u);
}

TEST_F(TierPagesTest, ADiskThatDoesNotAnswerDelaysNobodyBeyondTheDeadline) {
  Write("full", 200);
  FaultPlan plan;
  options_.new_queue = [&plan](uint32_t depth) {
    return IoQueueChoice{NewFaultyQueue(NewPreadQueue(depth), depth, &plan), OkStatus()};
  };
  TierRowOptions options;
  options.loads.load_timeout = std::chrono::milliseconds(20);
  {
    const Machine machine(options_, options);
    plan.Set([](const IoRequest& r) {
      return r.op == IoRequest::Op::kRead ? std::optional(IoFault{IoFault::Kind::kStuck, 0})
                                          : std::nullopt;
    });
    EXPECT_EQ(HeldAfterwards(machine, "full", 200), 0u);
    EXPECT_EQ(machine.pages->counters().late_loads, 1u);
    plan.Release();
  }
}

TEST_F(TierPagesTest, ASessionThatEndsDuringItsLoadLeavesNothing) {
  Write("full", 200);
  FaultPlan plan;
  options_.new_queue = [&plan](uint32_t depth) {
    return IoQueueChoice{NewFaultyQueue(NewPreadQueue(depth), depth, &plan), OkStatus()};
  };
  TierRowOptions options;
  options.loads.load_timeout = seconds(20);
  const Machine machine(options_, options);
  plan.Set([](const IoRequest& r) {
    return r.op == IoRequest::Op::kRead ? std::optional(IoFault{IoFault::Kind::kStuck, 0})
                                        : std::nullopt;
  });
  std::promise<Result<OpenedSequence>> answer;
  {
    TestSession session(machine.store.get());
    machine.store->openings().OpenSequence(
        session.id(), session.model(), "full", Tokens(200),
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    machine.store->sessions().EndSession(session.id(), SessionEnd::kDied);
  }
  plan.Release();
  EXPECT_EQ(answer.get_future().get().status().reason(), "SESSION_UNKNOWN");
  ExpectClean(*machine.store);
  machine.store->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*machine.store), 0u);
}

TEST_F(TierPagesTest, ADrainedDiskNeedsNoScanAfterAKill) {
  {
    const Machine machine(options_);
    TestSession session(machine.store.get());
    TestSequence s = TestSequence::Prompt(&session, "full", Tokens(325));
    ASSERT_TRUE(machine.pages->writer().queue().Drain().ok());
    const auto end = SteadyClock::now() + seconds(30);
    while (!machine.pages->writer().queue().drained()) {
      ASSERT_LT(SteadyClock::now(), end);
      std::this_thread::yield();
    }
    EXPECT_EQ(machine.pages->counters().written, 20u) << "what waited was written";
    // Drained, it reads and takes nothing.
    machine.store->eviction().Evict(false);
    TestSequence other = TestSequence::Prompt(&session, "full", Tokens(100, 50'000));
    EXPECT_EQ(machine.pages->counters().refused, 6u);
    ASSERT_TRUE(s.Close().ok());
    machine.store->eviction().Evict(false);
    EXPECT_EQ(HeldAfterwards(machine, "full", 325), 320u);
  }
  const Machine machine(options_);  // nobody stopped it
  EXPECT_EQ(machine.disk->Stats().scanned_segments, 0u);
  EXPECT_EQ(machine.disk->Stats().entries, 20u);
}

TEST_F(TierPagesTest, ADrainWhoseCheckpointFailsSaysSoAndIsTriedAgain) {
  FaultPlan plan;
  options_.new_queue = [&plan](uint32_t depth) {
    return IoQueueChoice{NewFaultyQueue(NewPreadQueue(depth), depth, &plan), OkStatus()};
  };
  const Machine machine(options_);
  plan.Set([](const IoRequest& r) {
    return r.op == IoRequest::Op::kFlush ? std::optional(IoFault{IoFault::Kind::kFail, EIO})
                                         : std::nullopt;
  });
  const auto end = SteadyClock::now() + seconds(30);
  Status status = machine.pages->writer().queue().Drain();
  for (; status.ok() && SteadyClock::now() < end;
       status = machine.pages->writer().queue().Drain()) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(machine.pages->writer().queue().drained());
  plan.Set(nullptr);
  while (!machine.pages->writer().queue().drained() && SteadyClock::now() < end) {
    (void)machine.pages->writer().queue().Drain();
    std::this_thread::yield();
  }
  EXPECT_TRUE(machine.pages->writer().queue().drained());
  machine.pages->writer().Resume();
  EXPECT_FALSE(machine.pages->writer().queue().draining());
}

TEST_F(TierPagesTest, AnotherBudgetCountsWhatLeft) {
  Write("full", 3000);
  const Machine machine(options_);
  const uint64_t before = machine.disk->Stats().entries;
  const Result<uint64_t> left = machine.values->Resize(2 << 20, SteadyClock::now() + seconds(30));
  ASSERT_TRUE(left.ok()) << left.status().ToString();
  EXPECT_GT(*left, 0u);
  EXPECT_EQ(machine.values->Stats().evicted, *left);
  EXPECT_EQ(machine.disk->Stats().entries, before - *left);
  EXPECT_LT(HeldAfterwards(machine, "full", 3000), 2992u);
}

class DiskReadersTest : public TierPagesTest {
 protected:
  // Pages of prompt number `i`, which are on disk after WriteLoads.
  static constexpr int kPages = 6;
  static std::vector<int32_t> LoadTokens(int i) { return Tokens(kPages * 16 + 1, i * 10000); }
  void WriteLoads(int n) {
    const Machine machine(options_);
    TestSession session(machine.store.get());
    for (int i = 0; i < n; ++i) {
      TestSequence s = TestSequence::Prompt(&session, "full", LoadTokens(i));
      keys_.push_back(machine.store->lookups()
                          .Lookup(session.id(), session.model(), LoadTokens(i))
                          .value()
                          .keys);
      EXPECT_EQ(keys_.back().size(), size_t{kPages});
    }
    machine.Settle();
    ASSERT_EQ(machine.pages->counters().written, static_cast<uint64_t>(n * kPages));
  }
  // A load of prompt number `i`: `round` is called in each of its rounds, `done` at its end.
  TierLoad LoadOf(int i, std::function<void()> round, std::function<void()> done) {
    TierLoad load;
    load.keys = keys_[static_cast<size_t>(i)];
    load.asked = SteadyClock::now();
    load.take = [round = std::move(round)](size_t, std::span<const LoadedValue> values) {
      round();
      return std::ranges::none_of(values, &LoadedValue::empty);
    };
    load.done = std::move(done);
    return load;
  }
  // A page a round.
  static TierRowOptions Readers(uint32_t n) {
    TierRowOptions options;
    options.loads.readers = n;
    options.writer.batch_bytes = options.loads.batch_bytes = 1;
    options.loads.load_timeout = seconds(30);
    return options;
  }
  std::vector<std::vector<PageKey>> keys_;
};

TEST_F(DiskReadersTest, AnOpenBehindALongLoadIsServedMeanwhile) {
  WriteLoads(2);
  const Machine machine(options_, Readers(2));
  std::promise<void> short_done, long_done;
  std::shared_future<void> short_is_done = short_done.get_future().share();
  bool meanwhile = false;
  const auto round = [&, asked = false]() mutable {
    if (std::exchange(asked, true)) return;
    // The long load does not go on before the short one has ended.
    ASSERT_TRUE(machine.pages->Load(LoadOf(
        1, [] {}, [&] { short_done.set_value(); })));
    meanwhile = short_is_done.wait_for(seconds(20)) == std::future_status::ready;
  };
  ASSERT_TRUE(machine.pages->Load(LoadOf(0, round, [&] { long_done.set_value(); })));
  ASSERT_EQ(long_done.get_future().wait_for(seconds(40)), std::future_status::ready);
  EXPECT_TRUE(meanwhile);
  short_is_done.wait();
  EXPECT_EQ(machine.pages->counters().read, 2u * kPages);
  EXPECT_EQ(machine.pages->counters().late_loads, 0u);
}

TEST_F(DiskReadersTest, OneReaderServesLoadsInRounds) {
  WriteLoads(3);
  const Machine machine(options_, Readers(1));
  std::string rounds;  // the one reader's
  std::promise<void> all_done;
  int done = 0;
  const auto note = [&](char name) { return [&rounds, name] { rounds += name; }; };
  const auto end = [&] {
    if (++done == 3) all_done.set_value();
  };
  const auto first = [&] {
    if (rounds.empty()) {
      EXPECT_TRUE(machine.pages->Load(LoadOf(1, note('b'), end)));
      EXPECT_TRUE(machine.pages->Load(LoadOf(2, note('c'), end)));
    }
    rounds += 'a';
  };
  ASSERT_TRUE(machine.pages->Load(LoadOf(0, first, end)));
  ASSERT_EQ(all_done.get_future().wait_for(seconds(30)), std::future_status::ready);
  EXPECT_EQ(rounds, "abcabcabcabcabcabc");
}

TEST_F(DiskReadersTest, EachLoadHasItsOwnDeadline) {
  WriteLoads(2);
  const Machine machine(options_, Readers(1));
  std::promise<void> all_done;
  int first = 0, second = 0, done = 0;
  const auto end = [&] {
    if (++done == 2) all_done.set_value();
  };
  TierLoad late = LoadOf(
      1, [&] { ++second; }, end);
  late.asked = SteadyClock::now() - seconds(31);
  ASSERT_TRUE(machine.pages->Load(LoadOf(
      0,
      [&] {
        if (first++ == 0) {
          ASSERT_TRUE(machine.pages->Load(late));
        }
      },
      end)));
  ASSERT_EQ(all_done.get_future().wait_for(seconds(30)), std::future_status::ready);
  EXPECT_EQ(first, kPages);
  EXPECT_EQ(second, 0);
  EXPECT_EQ(machine.pages->counters().late_loads, 1u);
}

TEST_F(TierPagesTest, StoppedItAnswersFromMemory) {
  Write("full", 200);
  const Machine machine(options_);
  machine.pages->Stop();
  EXPECT_EQ(HeldAfterwards(machine, "full", 200), 0u);
  EXPECT_EQ(machine.pages->counters().refused_loads, 1u);
}

// Nobody else is woken for it, and nothing is begun that comes too late.
TEST_F(TierPagesTest, WhoWaitsForAWriteMakesIt) {
  const Machine machine(options_);
  const std::vector<std::byte> bytes(100, std::byte{7});
  std::thread::id ended;
  TierPut put;
  put.key = "key";
  put.buffers = {bytes};
  TierCall call{SteadyClock::now() + seconds(30), {}, [&] { ended = std::this_thread::get_id(); }};
  call.waits = true;
  machine.values->Put({&put, 1}, call);
  EXPECT_EQ(ended, std::this_thread::get_id());
  EXPECT_TRUE(put.status.ok()) << put.status.ToString();
  call.deadline = SteadyClock::now();
  put.key = "late";
  machine.values->Put({&put, 1}, call);
  EXPECT_EQ(put.status.code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(KnownSizes(machine.values.get(), "late").empty());
}

// A writer that was faster than the stop shows nothing: then it is tried again.
TEST_F(TierPagesTest, WhatWaitsAtAStopIsDroppedAndCounted) {
  uint64_t dropped = 0;
  for (int round = 0; round < 50 && dropped == 0; ++round) {
    const Machine machine(options_);
    TestSession session(machine.store.get());
    TestSequence::Prompt(&session, "full", Tokens(200 * 16, 100000 * (round + 1)));
    machine.pages->Stop();
    const TierRowCounters counters = machine.pages->counters();
    dropped = counters.dropped();
    EXPECT_EQ(counters.dropped() + counters.written + counters.gone, 200u);
    EXPECT_EQ(machine.pages->counters().waiting, 0u);
    ExpectClean(*machine.store);
  }
  EXPECT_GT(dropped, 0u);
}

}  // namespace
}  // namespace kvstrata::testing
