// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/cpu/executor.h"

namespace kvstrata {
namespace {

// Every index exactly once, and visible to the caller without further synchronisation.
void ExpectEachOnce(Executor& executor, int64_t n) {
  std::vector<int> calls(static_cast<size_t>(n), 0);
  executor.ParallelFor(n, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
  EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(n), 1));
}

TEST(Executor, CallsEachIndexOnce) {
  for (int threads : {1, 2, 5}) {
    const auto pool = NewThreadPool(threads);
    EXPECT_EQ(pool->concurrency(), threads);
    for (int64_t n : {0, 1, 2, 3, 100, 5000}) ExpectEachOnce(*pool, n);
  }
  ExpectEachOnce(InlineExecutor(), 100);
  EXPECT_EQ(InlineExecutor().concurrency(), 1);
}

TEST(Executor, RunsOnSeveralThreadsAtOnce) {
  const auto pool = NewThreadPool(3);
  std::latch all(3);  // passes only if three calls are in progress together
  pool->ParallelFor(3, [&](int64_t) { all.arrive_and_wait(); });
}

TEST(Executor, ManySmallCalls) {
  const auto pool = NewThreadPool(4);
  int64_t total = 0;
  for (int round = 0; round < 5000; ++round) {
    std::atomic<int64_t> sum{0};
    pool->ParallelFor(4, [&](int64_t i) { sum.fetch_add(i, std::memory_order_relaxed); });
    total += sum.load();
  }
  EXPECT_EQ(total, 5000 * 6);
}

TEST(Executor, CallersFromSeveralThreads) {
  const auto pool = NewThreadPool(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) ExpectEachOnce(*pool, 1 + round % 17);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Executor, WorkersThatSleptWakeUp) {
  const auto pool = NewThreadPool(2);
  // The second thread can only arrive if the worker wakes, whether it has gone to sleep or not.
  for (int round = 0; round < 200; ++round) {
    std::latch both(2);
    pool->ParallelFor(2, [&](int64_t) { both.arrive_and_wait(); });
    for (int i = 0; i < round; ++i) std::this_thread::yield();
  }
}

TEST(Executor, PoolsComeAndGo) {
  for (int i = 0; i < 50; ++i) {
    const auto pool = NewThreadPool(3);
    if (i % 2 == 0) ExpectEachOnce(*pool, 10);
  }
}

}  // namespace
}  // namespace kvstrata
