// SPDX-License-Identifier: Apache-2.0
// Codec planes packed on the GPU against the host, on fresh random rows: the same extents of the
// same bytes, but for what headers say of who made them.
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>
#include <utility>

#include "kernels/plans/planes/cuda_planes_packer.h"
#include "kernels/plans/planes/planes_recompressor.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

// A sequence of one machine, whose groups are sealed there.
class Sealed {
 public:
  // packers: null: on the host.
  Sealed(std::unique_ptr<Recompressor> recompressor, std::byte* const* pages,
         const GpuPackers* packers)
      : recompressor_(std::move(recompressor)), pages_(pages), packers_(packers) {}

  RecompressInput Input(int32_t tokens) {
    views_.clear();
    for (const ExtentDraft& d : extents_) {
      const auto front = static_cast<int64_t>(d.bytes.size());
      if (d.on_device.data == nullptr) {
        views_.push_back({d.bytes.data(), front, d.tokens});
      } else {
        views_.push_back({d.on_device.data.get(), static_cast<int64_t>(d.on_device.size), d.tokens,
                          d.bytes.data(), front});
      }
    }
    RecompressInput input;
    input.view.pages = pages_;
    input.view.tokens = tokens;
    input.view.extents = views_.data();
    input.view.extent_count = static_cast<int32_t>(views_.size());
    input.backend = *FindBackend("simd");
    input.executor = &InlineExecutor();
    input.gpu_packers = packers_;
    return input;
  }
  // Until nothing is due.
  void Settle(int32_t tokens) {
    for (RecompressInput input = Input(tokens); recompressor_->Due(input); input = Input(tokens)) {
      EXPECT_EQ(recompressor_->Reads(input).in_place, packers_ != nullptr);
      Result<RecompressOutput> output = recompressor_->Run(input);
      ASSERT_TRUE(output.ok()) << output.status().ToString();
      for (ExtentDraft& d : output->extents) {
        if (d.kept >= 0) d = std::move(extents_[static_cast<size_t>(d.kept)]);
      }
      extents_ = std::move(output->extents);
    }
  }
  Recompressor& recompressor() { return *recompressor_; }
  size_t size() const { return extents_.size(); }
  kvstrata::Run tokens(size_t i) const { return extents_[i].tokens; }
  // All of an extent, as it is where somebody has copied it.
  std::vector<std::byte> Bytes(size_t i) const {
    const ExtentDraft& d = extents_[i];
    if (d.on_device.data == nullptr) return d.bytes;
    std::vector<std::byte> bytes(d.on_device.size);
    Check(cudaMemcpy(bytes.data(), d.on_device.data.get(), bytes.size(), cudaMemcpyDeviceToHost),
          "reading an extent");
    std::ranges::copy(d.bytes, bytes.begin());
    return bytes;
  }

 private:
  const std::unique_ptr<Recompressor> recompressor_;
  std::byte* const* const pages_;
  const GpuPackers* const packers_;
  std::vector<ExtentDraft> extents_;
  std::vector<ExtentView> views_;
};

// head_dim, page_tokens, dtype, keep, bytes of an extent
using Shape = std::tuple<int, int, DType, int, int64_t>;

class PlanesPackerCuda : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const auto [dim, page, dtype, keep, bytes] = GetParam();
    g_ = {.layers = 2,
          .query_heads = 6,
          .kv_heads = 3,
          .head_dim = dim,
          .page_tokens = page,
          .dtype = dtype};
    plan_ = ParsePlan("planes{min_tokens = 0, keep = " + std::to_string(keep) + "}").value();
    Result<GpuPackers> packers = NewGpuPackers(*kvs_cuda_ops(), 0);
    ASSERT_TRUE(packers.ok()) << packers.status().ToString();
    packers_ = std::move(*packers);
    pages_ = std::make_unique<ScatteredPages>(1, kTokens / page + 1, g_.page_bytes(), dtype, rng_);
    device_pages_.resize(static_cast<size_t>(pages_->stride()));
    Check(cudaMemcpy(device_pages_.data(), pages_->addresses(),
                     device_pages_.size() * sizeof(std::byte*), cudaMemcpyDeviceToHost),
          "reading addresses");
  }
  Sealed New(bool on_gpu) {
    return {NewPlanesRecompressor(plan_, g_, std::get<4>(GetParam())),
            on_gpu ? device_pages_.data() : pages_->TableOf(0), on_gpu ? &packers_ : nullptr};
  }

  static constexpr int32_t kTokens = 1100;
  Rng rng_{TestSeed()};
  Geometry g_;
  Plan plan_;
  GpuPackers packers_;
  std::unique_ptr<ScatteredPages> pages_;
  std::vector<std::byte*> device_pages_;
};

void ExpectSameExtent(const std::vector<std::byte>& got, const std::vector<std::byte>& want) {
  ASSERT_EQ(got.size(), want.size());
  ExtentHeader of_gpu, of_host;
  std::memcpy(&of_gpu, got.data(), sizeof(of_gpu));
  std::memcpy(&of_host, want.data(), sizeof(of_host));
  EXPECT_EQ(of_gpu.flags, kExtentUnhashed);
  of_gpu.flags = of_host.flags;
  of_gpu.checksum = of_host.checksum;
  EXPECT_EQ(std::memcmp(&of_gpu, &of_host, sizeof(of_gpu)), 0) << "headers";
  EXPECT_TRUE(VerifyExtent(got).ok());
  int64_t different = 0, first = -1;
  for (size_t i = sizeof(of_gpu); i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (different++ == 0) first = static_cast<int64_t>(i);
  }
  EXPECT_EQ(different, 0) << "bytes of " << got.size() << "; the first is byte " << first;
}

// Prompts of several groups, groups that fill one by one, and extents that join.
TEST_P(PlanesPackerCuda, SealsWhatTheHostSeals) {
  Sealed gpu = New(true), host = New(false);
  for (const int32_t tokens : {63, 64, 200, 450, 512, 575, 580, 700, kTokens}) {
    SCOPED_TRACE(tokens);
    ASSERT_NO_FATAL_FAILURE(gpu.Settle(tokens));
    ASSERT_NO_FATAL_FAILURE(host.Settle(tokens));
    ASSERT_EQ(gpu.size(), host.size());
    for (size_t i = 0; i < host.size(); ++i) {
      SCOPED_TRACE("extent " + std::to_string(i));
      ASSERT_EQ(gpu.tokens(i), host.tokens(i));
      ASSERT_NO_FATAL_FAILURE(ExpectSameExtent(gpu.Bytes(i), host.Bytes(i)));
    }
  }
  EXPECT_EQ(host.tokens(host.size() - 1).end, 1088);
}

TEST_P(PlanesPackerCuda, LeavesPagesOfTheHostToTheHost) {
  Sealed sealed(NewPlanesRecompressor(plan_, g_, std::get<4>(GetParam())), pages_->TableOf(0),
                &packers_);
  const RecompressInput input = sealed.Input(200);
  ASSERT_TRUE(sealed.recompressor().Due(input));
  EXPECT_FALSE(sealed.recompressor().Reads(input).in_place);
}

TEST_P(PlanesPackerCuda, StopsWhenItIsCancelled) {
  Sealed sealed = New(true);
  RecompressInput input = sealed.Input(200);
  const std::atomic<bool> cancelled = true;
  input.cancelled = &cancelled;
  EXPECT_EQ(sealed.recompressor().Run(input).status().code(), Code::kAborted);
}

INSTANTIATE_TEST_SUITE_P(Shapes, PlanesPackerCuda,
                         testing::Values(Shape{64, 16, DType::kBF16, 8, kExtentBytesGoal},
                                         Shape{128, 64, DType::kBF16, 8, kExtentBytesGoal},
                                         Shape{256, 32, DType::kF16, 4, kExtentBytesGoal},
                                         Shape{128, 16, DType::kF16, 8, 1}));

}  // namespace
}  // namespace kvstrata::cuda
