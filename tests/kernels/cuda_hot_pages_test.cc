// SPDX-License-Identifier: Apache-2.0
// How much of a GPU a sequence's hot cache takes.
#include "kernels/step/gpu/memory/cuda_hot_pages.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

namespace kvstrata {
namespace {

int32_t Slots(const char* plan, int32_t pages, int32_t page_tokens = 16) {
  Geometry g;
  g.layers = 32;
  g.query_heads = 32;
  g.kv_heads = 8;
  g.head_dim = 128;
  g.page_tokens = page_tokens;
  return CudaHotPages::SlotsOf(ParsePlan(plan).value(), g, pages);
}

TEST(CudaHotPages, HasSlotsForWhatAStepAttends) {
  constexpr int32_t k128K = 131072 / 16;
  // Lists of pages twice, and both ends of the ranges that are always attended.
  EXPECT_EQ(Slots("quest", k128K), 2 * 128 + 8);
  EXPECT_EQ(Slots("quest", k128K / 4, 64), 2 * 128 + 8);  // each unit may be in a page of its own
  EXPECT_EQ(Slots("quest{page = 64}", k128K), 2 * 128 + 8);
  EXPECT_EQ(Slots("window{n_sink = 16, n_recent = 496}", k128K), 2 * (32 + 4));
  EXPECT_EQ(Slots("chess", k128K), 2 * 40 * 2 + 2 * (27 * 2 + 4));
  // Lists of tokens once.
  EXPECT_EQ(Slots("sentencekv", k128K), 1024 + 2 * (4 + 4));
  EXPECT_EQ(Slots("tokenselect", k128K), 2048 + 2 * (40 + 4));
}

// A GPU of any size, in the host's memory.
const cuda::CudaOps& FakeOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake;
    fake.error_text = [](int) { return "failed on purpose"; };
    fake.allocate_device = [](uint64_t bytes, void** at) {
      *at = std::calloc(1, bytes);
      return *at == nullptr ? 2 : 0;
    };
    fake.free_device = [](void* at) {
      std::free(at);
      return 0;
    };
    return fake;
  }();
  return ops;
}

// Caches of one page a layer and slot: what the first ones take the next one finds gone, until they
// go.
TEST(CudaHotPages, TakeNoMoreThanTheirBudget) {
  const Geometry g{2, 8, 2, 64, 16, DType::kBF16};
  const Plan plan = ParsePlan("quest{budget = 256}").value();
  constexpr int32_t kPages = 100;
  const int32_t most = CudaHotPages::SlotsOf(plan, g, kPages);
  const auto base = uint64_t{(2 * 2 + 1) * kPages * 8};
  const auto slot =
      static_cast<uint64_t>(PageLayout::Of(g).layer_stride) * 2 + uint64_t{2 * 2 * 2 * 4};
  const uint64_t bytes = 2 * base + (static_cast<uint64_t>(most) + 3) * slot + slot - 1;
  const auto budget = std::make_shared<HotCacheBudget>(bytes);
  const auto create = [&] {
    return CudaHotPages::Create(FakeOps(), g, plan, kPages, budget).value();
  };
  auto first = create(), second = create(), third = create();
  EXPECT_EQ(first->table().slot_count, most);
  EXPECT_EQ(second->table().slot_count, 3);
  EXPECT_EQ(third->table().entries, nullptr);
  EXPECT_EQ(budget->left(), slot - 1);
  first.reset();
  EXPECT_EQ(create()->table().slot_count, most);
  second.reset();
  third.reset();
  EXPECT_EQ(budget->left(), bytes);
}

TEST(CudaHotPages, GiveBackWhatTheGpuHasNot) {
  cuda::CudaOps ops = FakeOps();
  ops.allocate_device = [](uint64_t, void**) { return 2; };
  const auto budget = std::make_shared<HotCacheBudget>(uint64_t{1} << 40);
  const Geometry g{2, 8, 2, 64, 16, DType::kBF16};
  const auto hot = CudaHotPages::Create(ops, g, ParsePlan("quest").value(), 100, budget).value();
  EXPECT_EQ(hot->table().entries, nullptr);
  EXPECT_EQ(budget->left(), uint64_t{1} << 40);
}

TEST(CudaHotPages, HasNoMoreSlotsThanPages) {
  EXPECT_EQ(Slots("quest", 100), 100);
  EXPECT_EQ(Slots("tokenselect{k = 100000}", 1 << 20), cuda::kHotSlotsMax);
}

}  // namespace
}  // namespace kvstrata
