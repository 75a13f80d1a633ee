// SPDX-License-Identifier: Apache-2.0
// The GPU's SegmentPacker against the host's, on fresh random rows.
//
// Eigenvectors of close eigenvalues may come out mixed, so rotations are not compared: the host
// packs once more with the GPU's. Then rows differ only where two channels are nearly as large, or
// a value was nearly halfway between two of bf16.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>

#include "kernels/codec/head_loop.h"
#include "kernels/plans/mosaickv/cuda_packer.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"
#include "tests/kernels/verify_extent.h"

namespace kvstrata::cuda {
namespace {

// A sequence's raw pages on the GPU and, the same, on the host. Channels differ in size and depend
// on each other, as keys do.
class Pages {
 public:
  Pages(const Geometry& g, int32_t tokens, Rng& rng)
      : pages_(1, (tokens + g.page_tokens - 1) / g.page_tokens, g.page_bytes(), g.dtype, rng) {
    std::vector<std::byte>& bytes = pages_.host();
    const auto row = static_cast<size_t>(g.row_bytes()),
               size = static_cast<size_t>(SizeOf(g.dtype));
    for (size_t at = 0; at < bytes.size(); at += row) {
      float before = 0;
      for (size_t c = 0; c < row / size; ++c) {
        std::byte* const x = &bytes[at + c * size];
        before = 0.6f * before + LoadFloat(x, g.dtype) * (c % 7 == 0 ? 3.0f : 0.5f);
        StoreFloat(x, g.dtype, before);
      }
    }
    pages_.Upload();
    device_.resize(static_cast<size_t>(pages_.stride()));
    Check(cudaMemcpy(device_.data(), pages_.addresses(), device_.size() * sizeof(std::byte*),
                     cudaMemcpyDeviceToHost),
          "reading addresses");
  }
  RecompressInput Input(bool on_device) const {
    RecompressInput input;
    input.view.pages = on_device ? device_.data() : pages_.TableOf(0);
    input.backend = *FindBackend("simd");
    input.executor = &InlineExecutor();
    return input;
  }

 private:
  ScatteredPages pages_;
  std::vector<std::byte*> device_;
};

struct ReadBack {
  std::vector<std::byte> bytes;
  PackedExtent extent;  // in `bytes`
};

// What an extent of a GPU is once it is copied: bytes there, the first of them here.
void Read(const PackedBytes& packed, const Geometry& g, Run tokens, ReadBack* out) {
  ASSERT_NE(packed.on_device.data, nullptr);
  out->bytes.resize(packed.on_device.size);
  Check(cudaMemcpy(out->bytes.data(), packed.on_device.data.get(), packed.on_device.size,
                   cudaMemcpyDeviceToHost),
        "reading an extent");
  ASSERT_LE(packed.bytes.size(), packed.on_device.size);
  std::ranges::copy(packed.bytes, out->bytes.begin());
  EXPECT_EQ(static_cast<int64_t>(packed.bytes.size()),
            DescriptionBytes(std::span(packed.bytes).first(kExtentFrontBytes),
                             static_cast<int64_t>(packed.on_device.size)));
  EXPECT_TRUE(VerifyExtent(out->bytes).ok());
  const ExtentView view{out->bytes.data(), static_cast<int64_t>(out->bytes.size()), tokens};
  Result<PackedExtent> extent = ReadPackedExtent(view, g);
  ASSERT_TRUE(extent.ok()) << extent.status().ToString();
  out->extent = std::move(*extent);
}

ExtentView DeviceView(const PackedBytes& packed, Run tokens) {
  return {packed.on_device.data.get(), static_cast<int64_t>(packed.on_device.size), tokens,
          packed.bytes.data(), static_cast<int64_t>(packed.bytes.size())};
}

void ExpectRotation(const float* r, int dim) {
  double worst = 0;
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j <= i; ++j) {
      double dot = i == j ? -1 : 0;
      for (int c = 0; c < dim; ++c) dot += double{r[i * dim + c]} * r[j * dim + c];
      worst = std::max(worst, std::abs(dot));
    }
  }
  EXPECT_LT(worst, 1e-4) << "rows are not orthonormal";
}

// At most 3 % of `count` rows may differ.
void ExpectNearlyEqual(const PackedRows& a, const PackedRows& b, int64_t count, const char* what) {
  ASSERT_EQ(a.stride, b.stride);
  int64_t differ = 0;
  for (int64_t i = 0; i < count; ++i) {
    differ += std::memcmp(a.data + i * a.stride, b.data + i * b.stride,
                          static_cast<size_t>(a.stride)) != 0;
  }
  EXPECT_LE(differ, count * 3 / 100 + 1) << what << ": rows of " << count;
}

using Shape = std::tuple<int, int, DType, bool>;  // head_dim, page_tokens, dtype, truncate

class SegmentPackerCuda : public testing::TestWithParam<Shape> {
 protected:
  SegmentPackerCuda() {
    const auto [dim, page, dtype, truncate] = GetParam();
    g_.layers = 2;
    g_.kv_heads = 3;
    g_.query_heads = 6;
    g_.head_dim = dim;
    g_.page_tokens = page;
    g_.dtype = dtype;
    plan_.packed.truncate = truncate;
    plan_.packed.segment = kTokens;
    plan_.stored.max_loss = 1;  // what is to be measured is packed by the CPUs
  }

  static constexpr int32_t kTokens = 4500;  // more than a chunk of op rotate_pack
  Geometry g_;
  Plan plan_;
  Rng rng_{TestSeed()};
};

TEST_P(SegmentPackerCuda, PacksAsTheHostDoes) {
  auto made = NewCudaPacker(*kvs_cuda_ops(), 0);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const SegmentPacker& gpu = **made;
  const Pages pages(g_, kTokens, rng_);
  const RecompressInput on_device = pages.Input(true), on_host = pages.Input(false);
  const kvstrata::Run segment = {g_.page_tokens / 2, kTokens};  // nor need it begin with a page
  ASSERT_TRUE(gpu.Packs(on_device, g_, plan_, segment));
  EXPECT_FALSE(gpu.Packs(on_host, g_, plan_, segment)) << "pages of the host";
  Result<SegmentPlans> plans = gpu.FindPlans(on_device, g_, plan_, segment);
  ASSERT_TRUE(plans.ok()) << plans.status().ToString();
  Result<SegmentPlans> host_plans = HostPacker().FindPlans(on_host, g_, plan_, segment);
  ASSERT_TRUE(host_plans.ok()) << host_plans.status().ToString();

  PackedRange range = {segment, true, {}};
  range.info.plan_begin = segment.begin;
  range.info.plan_end = segment.end;
  range.info.loss = 1;
  Result<PackedBytes> packed = gpu.PackRange(on_device, g_, plan_, *plans, range, {});
  ASSERT_TRUE(packed.ok()) << packed.status().ToString();
  ReadBack read;
  ASSERT_NO_FATAL_FAILURE(Read(*packed, g_, segment, &read));
  ASSERT_TRUE(read.extent.has_rotations());
  EXPECT_TRUE(read.extent.final);
  EXPECT_EQ(read.extent.truncated, plan_.packed.truncate);

  // The host, with the GPU's rotations; and with its own, which must lose as much.
  Result<PackedBytes> same =
      HostPacker().PackRange(on_host, g_, plan_, PlansIn(read.extent), range, {});
  ASSERT_TRUE(same.ok()) << same.status().ToString();
  Result<PackedBytes> own = HostPacker().PackRange(on_host, g_, plan_, *host_plans, range, {});
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  EXPECT_NEAR(packed->info.loss, same->info.loss, 1e-4 * same->info.loss);
  EXPECT_NEAR(packed->info.loss, own->info.loss, 1e-3 * own->info.loss);
  const ExtentView view{same->bytes.data(), static_cast<int64_t>(same->bytes.size()), segment};
  const Result<PackedExtent> expected = ReadPackedExtent(view, g_);
  ASSERT_TRUE(expected.ok());
  for (size_t h = 0; h < read.extent.heads.size(); ++h) {
    SCOPED_TRACE(h);
    const PackedHead &a = read.extent.heads[h], &b = expected->heads[h];
    ExpectRotation(a.r_k, g_.head_dim);
    ExpectRotation(a.r_v, g_.head_dim);
    for (int c = 0; c < g_.head_dim; ++c) {
      EXPECT_NEAR(a.eigenvalues[c], host_plans->heads[h].eigenvalues[c], 1e-4 * a.eigenvalues[0]);
    }
    const int64_t rows = read.extent.rows();
    ExpectNearlyEqual(a.keys, b.keys, rows, "keys");
    ExpectNearlyEqual(a.values, b.values, rows, "values");
    ExpectNearlyEqual(a.blocks, b.blocks, (rows + a.block - 1) / a.block, "blocks");
  }
}

// A later extent of a segment has no rotations; those that the first one holds, on the GPU, serve.
TEST_P(SegmentPackerCuda, GoesOnWithThePlansOfAnExtent) {
  auto made = NewCudaPacker(*kvs_cuda_ops(), 0);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const SegmentPacker& gpu = **made;
  const Pages pages(g_, kTokens, rng_);
  const RecompressInput on_device = pages.Input(true);
  const Result<SegmentPlans> plans = gpu.FindPlans(on_device, g_, plan_, {0, kTokens});
  ASSERT_TRUE(plans.ok()) << plans.status().ToString();
  PackedRange range = {{0, 3072}, true, {}};
  range.info.plan_end = kTokens;
  Result<PackedBytes> first = gpu.PackRange(on_device, g_, plan_, *plans, range, {});
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  const Result<PackedExtent> on_gpu = ReadPackedExtent(DeviceView(*first, range.tokens), g_);
  ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().ToString();
  range.tokens = {3072, kTokens};
  range.info.loss = first->info.loss;
  Result<PackedBytes> rest = gpu.PackRange(on_device, g_, plan_, PlansIn(*on_gpu), range, {});
  ASSERT_TRUE(rest.ok()) << rest.status().ToString();
  ReadBack read;
  ASSERT_NO_FATAL_FAILURE(Read(*rest, g_, range.tokens, &read));
  EXPECT_FALSE(read.extent.has_rotations());

  // All at once: the same rows, the same loss.
  range.tokens = {0, kTokens};
  range.info.loss = 0;
  Result<PackedBytes> whole = gpu.PackRange(on_device, g_, plan_, *plans, range, {});
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  EXPECT_NEAR(rest->info.loss, whole->info.loss, 1e-6 * whole->info.loss);
  ReadBack all;
  ASSERT_NO_FATAL_FAILURE(Read(*whole, g_, range.tokens, &all));
  for (size_t h = 0; h < read.extent.heads.size(); ++h) {
    const PackedRows &a = read.extent.heads[h].keys, &b = all.extent.heads[h].keys;
    EXPECT_EQ(std::memcmp(a.data, b.data + 3072 * b.stride,
                          static_cast<size_t>(read.extent.rows() * a.stride)),
              0);
  }
}

// Flushes with a segment's plans, and their join: byte for byte the host's join of the same.
TEST_P(SegmentPackerCuda, FlushesAndJoins) {
  auto made = NewCudaPacker(*kvs_cuda_ops(), 0);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const SegmentPacker& gpu = **made;
  constexpr int32_t kBegin = 1024, kBuffer = 32, kFlushes = 3;
  const Pages pages(g_, kTokens, rng_);
  const RecompressInput on_device = pages.Input(true);
  const Result<SegmentPlans> plans = gpu.FindPlans(on_device, g_, plan_, {0, kBegin});
  ASSERT_TRUE(plans.ok()) << plans.status().ToString();
  std::vector<PackedBytes> packed;
  std::vector<ReadBack> read(kFlushes);
  std::vector<PackedExtent> on_gpu, on_host;
  std::vector<double> losses;
  for (int i = 0; i < kFlushes; ++i) {
    PackedRange range = {{kBegin + i * kBuffer, kBegin + (i + 1) * kBuffer}, false, {}};
    range.info.buffer = kBuffer;
    range.info.loss = i == 0 ? 0 : packed.back().info.loss;
    Result<PackedBytes> piece = gpu.PackRange(on_device, g_, plan_, *plans, range, losses);
    ASSERT_TRUE(piece.ok()) << piece.status().ToString();
    packed.push_back(std::move(*piece));
    ASSERT_NO_FATAL_FAILURE(Read(packed.back(), g_, range.tokens, &read[static_cast<size_t>(i)]));
    on_host.push_back(read[static_cast<size_t>(i)].extent);
    losses.push_back(on_host.back().flushes[0]);
    EXPECT_NEAR(packed.back().info.loss, std::accumulate(losses.begin(), losses.end(), 0.0), 1e-9);
    Result<PackedExtent> extent = ReadPackedExtent(DeviceView(packed.back(), range.tokens), g_);
    ASSERT_TRUE(extent.ok()) << extent.status().ToString();
    on_gpu.push_back(std::move(*extent));
  }
  const kvstrata::Run all = {kBegin, kBegin + kFlushes * kBuffer};
  Result<PackedBytes> joined = gpu.Join(g_, on_gpu), expected = HostPacker().Join(g_, on_host);
  ASSERT_TRUE(joined.ok()) << joined.status().ToString();
  ASSERT_TRUE(expected.ok()) << expected.status().ToString();
  ReadBack bytes;
  ASSERT_NO_FATAL_FAILURE(Read(*joined, g_, all, &bytes));
  ASSERT_EQ(bytes.bytes.size(), expected->bytes.size());
  EXPECT_EQ(std::memcmp(bytes.bytes.data() + sizeof(ExtentHeader),
                        expected->bytes.data() + sizeof(ExtentHeader),
                        bytes.bytes.size() - sizeof(ExtentHeader)),
            0);
}

TEST_P(SegmentPackerCuda, StopsWhenItIsCancelled) {
  auto made = NewCudaPacker(*kvs_cuda_ops(), 0);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const Pages pages(g_, 64, rng_);
  RecompressInput on_device = pages.Input(true);
  const std::atomic<bool> cancelled = true;
  on_device.cancelled = &cancelled;
  EXPECT_EQ((*made)->FindPlans(on_device, g_, plan_, {0, 64}).status().code(), Code::kAborted);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SegmentPackerCuda,
                         testing::Values(Shape{128, 16, DType::kBF16, true},
                                         Shape{64, 32, DType::kF16, false}));

}  // namespace
}  // namespace kvstrata::cuda
