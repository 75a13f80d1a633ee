// SPDX-License-Identifier: Apache-2.0
// What tests of the store over a disk share.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "server/tier/disk/disk_value_tier.h"
#include "server/work/tiers/tier_chain.h"
#include "tests/fakes/fake_gpu_memory.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {

using SteadyClock = std::chrono::steady_clock;

// A store over a disk: what a daemon is between two starts.
struct Machine {
  explicit Machine(const DiskTierOptions& disk_options, TierRowOptions options = {},
                   uint64_t pool_pages = 256, bool gpu = false,
                   decltype(StoreOptions::new_recompressor) codec = nullptr,
                   DiskValueTierOptions value_options = {}) {
    Result<std::unique_ptr<DiskTier>> opened =
        DiskTier::Open(disk_options, SteadyClock::now() + std::chrono::seconds(30));
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    disk = std::move(*opened);
    value_options.readers = options.loads.readers;
    values = std::make_unique<DiskValueTier>(value_options, disk.get());
    StoreOptions pools = SmallPools(pool_pages, 64);
    pools.new_recompressor = std::move(codec);
    if (gpu) {
      auto fail = std::make_shared<std::atomic<bool>>(false);
      store =
          std::move(*Store::Create(pools, std::make_unique<FakeGpuMemory>(fail), NewHostMemory()));
    } else {
      store = NewStore(pools);
    }
    pages = std::make_unique<TierRow>(options, store.get(), values.get(), values->Hooks());
    tiers = std::make_unique<TierChain>(store.get());
    tiers->Add(pages.get());
  }
  // Waits until everything that was offered is on disk, or counted.
  void Settle() const {
    const auto end = SteadyClock::now() + std::chrono::seconds(30);
    while (pages->counters().waiting != 0) {
      ASSERT_LT(SteadyClock::now(), end) << "the writer does not come to an end";
      std::this_thread::yield();
    }
  }
  // As a client opens: answered when the disk was asked.
  Result<OpenedSequence> Open(const TestSession& session, std::string_view plan,
                              std::span<const int32_t> tokens) const {
    std::promise<Result<OpenedSequence>> answer;
    store->openings().OpenSequence(
        session.id(), session.model(), plan, tokens,
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    return answer.get_future().get();
  }

  std::unique_ptr<DiskTier> disk;
  std::unique_ptr<DiskValueTier> values;
  std::unique_ptr<Store> store;
  std::unique_ptr<TierRow> pages;
  std::unique_ptr<TierChain> tiers;
};

}  // namespace kvstrata::testing
