// SPDX-License-Identifier: Apache-2.0
// Codec planes packed on the GPU against the host, on fresh random rows: the same extents of the
// same bytes, but for what headers say of who made them.
#include <gtest/gtest.h>

#include <tuple>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/page_locked_bytes.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"
#include "tests/kernels/sealed_planes.h"

namespace kvstrata::cuda {
namespace {

// head_dim, page_tokens, dtype, tokens of a group, keep, bytes of an extent, where lower runs lie
using Shape = std::tuple<int, int, DType, int, int, int64_t, Tier>;

void ReadDevice(std::byte* to, const std::byte* from, size_t bytes) {
  Check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "reading an extent");
}

class PlanesPackerCuda : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const auto [dim, page, dtype, unit, keep, bytes, lower] = GetParam();
    g_ = {.layers = 2,
          .query_heads = 6,
          .kv_heads = 3,
          .head_dim = dim,
          .page_tokens = page,
          .dtype = dtype};
    plan_ = ParsePlan("strata{min_tokens = 0}").value();
    plan_.planes.unit = unit;
    plan_.planes.keep = keep;
    plan_.planes.lower = lower;
    Result<GpuPackers> packers = NewGpuPackers(*kvs_cuda_ops(), 0);
    ASSERT_TRUE(packers.ok()) << packers.status().ToString();
    packers_ = std::move(*packers);
    pages_ = std::make_unique<ScatteredPages>(1, kTokens / page + 1, g_.page_bytes(), dtype, rng_);
    device_pages_.resize(static_cast<size_t>(pages_->stride()));
    Check(cudaMemcpy(device_pages_.data(), pages_->addresses(),
                     device_pages_.size() * sizeof(std::byte*), cudaMemcpyDeviceToHost),
          "reading addresses");
  }
  SealedPlanes New(bool on_gpu) {
    return {NewPlanesRecompressor(plan_, g_, std::get<5>(GetParam())),
            on_gpu ? device_pages_.data() : pages_->TableOf(0),
            on_gpu ? &packers_ : nullptr,
            {ReadDevice, NewPageLocked}};
  }

  static constexpr int32_t kTokens = 1100;
  Rng rng_{TestSeed()};
  Geometry g_;
  Plan plan_;
  GpuPackers packers_;
  std::unique_ptr<ScatteredPages> pages_;
  std::vector<std::byte*> device_pages_;
};

// Prompts of several groups, groups that fill one by one, and extents that join.
TEST_P(PlanesPackerCuda, SealsWhatTheHostSeals) {
  SealedPlanes gpu = New(true), host = New(false);
  for (const int32_t tokens : {15, 63, 64, 200, 450, 512, 575, 580, 1016, 1024, kTokens}) {
    SCOPED_TRACE(tokens);
    ASSERT_NO_FATAL_FAILURE(gpu.Settle(tokens));
    ASSERT_NO_FATAL_FAILURE(host.Settle(tokens));
    ASSERT_NO_FATAL_FAILURE(ExpectSameExtents(gpu, host, ReadDevice));
  }
  EXPECT_EQ(host.extents().back().tokens.end, 1088);
}

TEST_P(PlanesPackerCuda, LeavesPagesOfTheHostToTheHost) {
  SealedPlanes sealed(NewPlanesRecompressor(plan_, g_, std::get<5>(GetParam())), pages_->TableOf(0),
                      &packers_);
  const RecompressInput input = sealed.Input(200);
  ASSERT_TRUE(sealed.recompressor().Due(input));
  EXPECT_FALSE(sealed.recompressor().Reads(input).in_place);
}

TEST_P(PlanesPackerCuda, StopsWhenItIsCancelled) {
  SealedPlanes sealed = New(true);
  RecompressInput input = sealed.Input(200);
  const std::atomic<bool> cancelled = true;
  input.cancelled = &cancelled;
  EXPECT_EQ(sealed.recompressor().Run(input).status().code(), Code::kAborted);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PlanesPackerCuda,
    testing::Values(Shape{64, 16, DType::kBF16, 16, 8, kExtentBytesGoal, Tier::kDevice},
                    Shape{128, 64, DType::kBF16, 64, 8, kExtentBytesGoal, Tier::kDevice},
                    Shape{128, 64, DType::kBF16, 64, 8, kExtentBytesGoal, Tier::kHost},
                    Shape{256, 32, DType::kF16, 64, 4, kExtentBytesGoal, Tier::kDevice},
                    Shape{256, 32, DType::kF16, 64, 4, kExtentBytesGoal, Tier::kHost},
                    Shape{128, 16, DType::kF16, 64, 8, 1, Tier::kDevice}));

}  // namespace
}  // namespace kvstrata::cuda
