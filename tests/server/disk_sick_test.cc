// SPDX-License-Identifier: Apache-2.0
// A disk that is stuck, fails or is full beside clients that need none: opens of what is in memory
// and steps take as long as beside a healthy disk. The figures (medians of rounds' p99) are
// printed; others use the machine too, so the test fails only at four times the healthy one and as
// long as a load may wait, or when a single call waited for what the disk never answered.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "tests/fakes/scratch_dir.h"
#include "tests/server/disk_machine.h"
#include "tests/server/tier/test_queues.h"

namespace kvstrata::testing {
namespace {

constexpr int kRounds = 7, kStepsOfRound = 300;
constexpr auto kLoadTimeout = std::chrono::milliseconds(20);
const std::vector<int32_t> kHeld = Tokens(4096), kOnDisk = Tokens(320, 100000);

// A machine whose disk has one sickness, and clients: one that works in memory and is measured, and
// one that asks for the disk meanwhile, to read and to write.
class Patient {
 public:
  Patient(const char* name, bool asks, std::optional<IoFault> fault)
      : name_(name), asks_(asks), machine_(Options(), Timeouts(), 2048) {
    TestSequence on_disk = TestSequence::Prompt(&other_, "full", kOnDisk);
    machine_.Settle();
    EXPECT_TRUE(on_disk.Close().ok());
    machine_.store->eviction().Evict(false);
    held_.emplace(TestSequence::Prompt(&session_, "full", kHeld));  // stays open: in memory
    machine_.Settle();
    if (fault) plan_.Set([=](const IoRequest&) { return fault; });
  }
  ~Patient() { plan_.Release(); }

  void Round() {
    machine_.store->eviction().Evict(false);
    std::atomic<bool> stop = !asks_;
    std::thread asker([&] {
      while (!stop) Ask();
    });
    for (int i = 0; i < kStepsOfRound; ++i) Measure();
    stop = true;
    asker.join();
    for (const std::vector<double>* us : {&opens_, &steps_}) {
      longest_ = std::max(longest_, std::ranges::max(*us));
    }
    open_p99_.push_back(Quantile(&opens_, 99));
    step_p99_.push_back(Quantile(&steps_, 99));
    opens_.clear();
    steps_.clear();
  }

  double OpenP99() { return Quantile(&open_p99_, 50); }
  double StepP99() { return Quantile(&step_p99_, 50); }
  double longest() const { return longest_; }
  const char* name() const { return name_; }
  int32_t asked() const { return asked_; }
  void ExpectSound() {
    held_->ExpectIntact();
    ExpectClean(*machine_.store);
  }

 private:
  DiskTierOptions Options() {
    DiskTierOptions options;
    options.directory = dir_ / "tier";
    options.budget_bytes = 32 << 20;
    options.segment_bytes = 1 << 20;
    options.new_queue = [this](uint32_t depth) {
      IoQueueChoice choice = NewIoQueue(depth);
      return IoQueueChoice{NewFaultyQueue(std::move(choice.queue), depth, &plan_), choice.degraded};
    };
    return options;
  }
  static TierRowOptions Timeouts() {
    TierRowOptions options;
    options.loads.load_timeout = kLoadTimeout;
    return options;
  }
  static double Us(SteadyClock::time_point begin) {
    return std::chrono::duration<double, std::micro>(SteadyClock::now() - begin).count();
  }
  static double Quantile(std::vector<double>* us, size_t percent) {
    const auto at = us->begin() + static_cast<ptrdiff_t>(us->size() * percent / 100);
    std::nth_element(us->begin(), at, us->end());
    return *at;
  }

  // An open that wants the disk, then a prompt that is written to it.
  void Ask() {
    machine_.store->eviction().Evict(false);
    const Result<OpenedSequence> opened = machine_.Open(other_, "full", kOnDisk);
    ASSERT_TRUE(opened.ok());
    ASSERT_TRUE(machine_.store->sequences().CloseSequence(other_.id(), opened->sequence).ok());
    TestSequence fresh = TestSequence::Prompt(&other_, "full", Tokens(33, 200000 + 100 * asked_));
    ASSERT_TRUE(fresh.Close().ok());
    ++asked_;
    std::this_thread::sleep_for(kLoadTimeout / 10);  // else a healthy disk is asked much more often
  }
  void Measure() {
    auto begin = SteadyClock::now();
    const Result<OpenedSequence> opened = machine_.Open(session_, "full", kHeld);
    opens_.push_back(Us(begin));
    ASSERT_TRUE(opened.ok());
    ASSERT_EQ(opened->held_tokens, 4080u);
    TestSequence s(&session_, *opened, kHeld);
    const std::vector<int32_t> fresh = Tokens(16, 10'000'000 + 16 * measured_++);
    begin = SteadyClock::now();
    ASSERT_TRUE(s.Append(fresh).ok());  // fills a page, which is offered to the disk
    steps_.push_back(Us(begin));
    ASSERT_TRUE(s.Close().ok());
  }

  const char* const name_;
  const bool asks_;
  const ScratchDir dir_;
  FaultPlan plan_;
  Machine machine_;
  TestSession session_{machine_.store.get()}, other_{machine_.store.get()};
  std::optional<TestSequence> held_;
  std::vector<double> opens_, steps_, open_p99_, step_p99_;
  double longest_ = 0;
  int32_t asked_ = 0, measured_ = 0;
};

TEST(SickDisk, HoldsUpNeitherStepsNorOpensInMemory) {
  Patient idle("not asked", false, std::nullopt), healthy("healthy", true, std::nullopt),
      stuck("stuck", true, IoFault{IoFault::Kind::kStuck}),
      failing("EIO", true, IoFault{IoFault::Kind::kFail, EIO}),
      full("ENOSPC", true, IoFault{IoFault::Kind::kFail, ENOSPC});
  std::vector<Patient*> all = {&idle, &healthy, &stuck, &failing, &full};
  for (int i = 0; i < kRounds; ++i) {
    for (Patient* p : all) p->Round();
    std::rotate(all.begin(), all.begin() + 1, all.end());
  }
  const double open = healthy.OpenP99(), step = healthy.StepP99();
  const double wait = std::chrono::duration<double, std::micro>(kLoadTimeout).count();
  for (Patient* p : {&idle, &healthy, &stuck, &failing, &full}) {
    std::printf("%-10s asked %5d times: p99 of open %7.1f us (x %.2f), of step %7.1f us (x %.2f)\n",
                p->name(), p->asked(), p->OpenP99(), p->OpenP99() / open, p->StepP99(),
                p->StepP99() / step);
    p->ExpectSound();
    EXPECT_EQ(p->asked() > 0, p != &idle);
    EXPECT_LT(p->longest(), 100 * wait) << p->name();  // a write is given up after five times that
    EXPECT_LT(p->OpenP99(), std::max(4 * open, wait)) << p->name();
    EXPECT_LT(p->StepP99(), std::max(4 * step, wait)) << p->name();
  }
}

}  // namespace
}  // namespace kvstrata::testing
