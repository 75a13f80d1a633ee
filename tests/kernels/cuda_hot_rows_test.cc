// SPDX-License-Identifier: Apache-2.0
// How much of a GPU a sequence's copies of lower rows take.
#include "kernels/step/gpu/memory/cuda_hot_rows.h"

#include <gtest/gtest.h>

#include <memory>

#include "tests/fakes/planes_gpu.h"

namespace kvstrata {
namespace {

constexpr CudaHotRows::Shape kShape = {6, 8, 192};

uint64_t Groups(const std::shared_ptr<CudaHotRows>& hot) {
  return static_cast<uint64_t>(hot->table().groups);
}

// With 8 KV heads of 128 channels, upper runs and copies are a fifth of rows of 16 bits.
TEST(CudaHotRows, WithUpperRunsTheyAreAFifth) {
  const PlanesFormat f{128, 64, 8};
  const CudaHotRows::Shape shape{8, 8, f.row_bytes()};
  EXPECT_LE(5 * (8 * f.upper_bytes() + static_cast<int64_t>(shape.group_bytes())),
            8 * 64 * 2 * 128 * 2);
}

// What the first ones take the next one finds gone, until they go.
TEST(CudaHotRows, TakeNoMoreThanTheirBudget) {
  const uint64_t bytes = 15 * kShape.group_bytes() - 1;
  const auto budget = std::make_shared<HotCacheBudget>(bytes);
  const auto create = [&] {
    return CudaHotRows::Create(testing::PlanesGpuOps(), kShape, 10, budget).value();
  };
  auto first = create(), second = create(), third = create();
  EXPECT_EQ(Groups(first), 10u);
  EXPECT_NE(first->table().tags, 0u);
  EXPECT_EQ(Groups(second), 4u);
  EXPECT_EQ(second->groups(), 10) << "so that it is not made anew each step";
  EXPECT_EQ(third->table().tags, 0u);
  first.reset();
  EXPECT_EQ(Groups(create()), 10u);
  second.reset();
  third.reset();
  EXPECT_EQ(budget->left(), bytes);
}

TEST(CudaHotRows, GiveBackWhatTheGpuHasNot) {
  cuda::CudaOps ops = testing::PlanesGpuOps();
  ops.allocate_device = [](uint64_t, void**) { return 2; };
  const auto budget = std::make_shared<HotCacheBudget>(uint64_t{1} << 40);
  const auto hot = CudaHotRows::Create(ops, kShape, 10, budget).value();
  EXPECT_EQ(hot->table().tags, 0u);
  EXPECT_EQ(budget->left(), uint64_t{1} << 40);
}

}  // namespace
}  // namespace kvstrata
