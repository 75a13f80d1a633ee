// SPDX-License-Identifier: Apache-2.0
// The packer of codec planes on a table of ops that is a GPU in host memory and computes as `ref`
// does: which groups are packed, which are copied, and where they come to lie. The kernels:
// tests/cuda/planes_packer_cuda_test.cc.
#include "tests/fakes/planes_gpu.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/sealed_planes.h"

namespace kvstrata {
namespace {

constexpr int32_t kTokens = 1100;

std::shared_ptr<std::byte[]> NewBytes(uint64_t bytes) {
  constexpr uint64_t kAlign = 64;
  const uint64_t whole = (bytes + kAlign - 1) / kAlign * kAlign;
  return {static_cast<std::byte*>(std::aligned_alloc(kAlign, whole)),
          [](std::byte* p) { std::free(p); }};
}

// Extents of one, eight and 64 groups, each of which takes over the groups of those before; whole
// ones, and with lower runs on the host.
class CudaPlanesPacker : public ::testing::TestWithParam<Tier> {};

INSTANTIATE_TEST_SUITE_P(, CudaPlanesPacker, ::testing::Values(Tier::kDevice, Tier::kHost),
                         [](const auto& lower) { return std::string(NameOf(lower.param)); });

TEST_P(CudaPlanesPacker, SealsWhatTheHostSeals) {
  Plan plan = PlanesPlan();
  plan.planes.unit = 16;
  plan.planes.lower = GetParam();
  Geometry g{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64};
  g.dtype = DType::kBF16;
  const Inputs in(g, kTokens, 73);
  CodecSequence rows(plan, g, in);
  rows.Commit(kTokens);
  const RecompressInput input = rows.Input();
  const GpuPackers packers = std::move(NewGpuPackers(testing::PlanesGpuOps(), 0)).value();
  const ReadBytes read = [](std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
  };
  for (const int64_t bytes : {kExtentBytesGoal, int64_t{1}}) {
    const auto sealed = [&](const GpuPackers* on) {
      return SealedPlanes(NewPlanesRecompressor(plan, g, bytes), input.view.pages, on,
                          {read, NewBytes});
    };
    SealedPlanes gpu = sealed(&packers), host = sealed(nullptr);
    for (const int32_t tokens : {15, 16, 60, 127, 128, 500, 1016, 1024, kTokens}) {
      SCOPED_TRACE(tokens);
      ASSERT_NO_FATAL_FAILURE(gpu.Settle(tokens));
      ASSERT_NO_FATAL_FAILURE(host.Settle(tokens));
      ASSERT_NO_FATAL_FAILURE(ExpectSameExtents(gpu, host, read));
    }
    EXPECT_EQ(host.extents().back().tokens.end, 1088);
    EXPECT_EQ(host.extents().back().tier, GetParam());
  }
}

}  // namespace
}  // namespace kvstrata
