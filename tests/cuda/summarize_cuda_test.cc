// SPDX-License-Identifier: Apache-2.0
// Summaries made on the GPU are those of ref bit for bit: minima, maxima, means and variances of
// tokens, means of means, whole ranges at once or piece by piece, and no other byte of the index is
// touched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/summarize/summarize.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/scattered_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayer = 1, kBatch = 3, kTokensMax = 4500;

class SummarizeCase {
 public:
  SummarizeCase(IndexLayout::Kind kind, const Geometry& g, const std::vector<int32_t>& units,
                DType mean_dtype, std::mt19937_64& rng)
      : geometry_(g), layout_(PageLayout::Of(g)) {
    index_ = MakeIndexLayout(kind, g, units.data(), static_cast<int>(units.size()), {}, mean_dtype);
    const int pages = (kTokensMax + g.page_tokens - 1) / g.page_tokens;
    pages_ = std::make_unique<ScatteredPages>(kBatch, pages, g.page_bytes(), g.dtype, rng);
    AddSpecials(rng);
    blocks_ = std::make_unique<ScatteredPages>(kBatch, index_.BlocksFor(kTokensMax),
                                               index_.block_bytes, DType::kF32, rng);
    from_ = DeviceArray<int32_t>(kBatch);
    to_ = DeviceArray<int32_t>(kBatch);
  }

  SummarizeBatch WorkOf(int level) const {
    SummarizeBatch w;
    using Kind = SummarizeBatch::Kind;
    const bool means = index_.kind == IndexLayout::Kind::kMean;
    w.kind = means                                          ? Kind::kMean
             : index_.kind == IndexLayout::Kind::kDeviation ? Kind::kDeviation
                                                            : Kind::kMinMax;
    w.summary = IndexRows(blocks_->addresses(), blocks_->stride(), index_, level, kLayer, 0);
    if (!means) w.field_stride = index_.RowOffset(0, kLayer, 1, 0, 0) - w.summary.offset;
    w.source =
        level > 0 ? IndexRows(blocks_->addresses(), blocks_->stride(), index_, level - 1, kLayer, 0)
                  : Keys();
    w.unit_rows =
        index_.levels[level].unit_tokens / (level > 0 ? index_.levels[level - 1].unit_tokens : 1);
    w.from = from_.get();
    w.to = to_.get();
    w.batch = kBatch;
    w.units_max = kTokensMax / index_.levels[level].unit_tokens;
    return w;
  }

  void SetRange(const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
    from_.Write(from);
    to_.Write(to);
  }

  // Applies `ref` to the host's copy for the same rows, and compares all bytes.
  void ExpectReference(int level, const std::vector<int32_t>& from,
                       const std::vector<int32_t>& to) {
    const SummarizeBatch batch = WorkOf(level);
    for (int b = 0; b < kBatch; ++b) {
      for (int32_t u = from[b] / batch.unit_rows; u < to[b] / batch.unit_rows; ++u) {
        for (int h = 0; h < geometry_.kv_heads; ++h) Reference(batch, level, b, h, u);
      }
    }
    const std::vector<std::byte> want = blocks_->host();
    blocks_->Download();
    EXPECT_EQ(std::memcmp(want.data(), blocks_->host().data(), want.size()), 0);
  }

 private:
  DeviceRows Keys() const {
    PagedLayer layer;
    layer.pages = pages_->addresses();
    layer.page_stride = pages_->stride();
    layer.page_tokens = geometry_.page_tokens;
    layer.kv_heads = geometry_.kv_heads;
    layer.head_dim = geometry_.head_dim;
    layer.dtype = geometry_.dtype;
    layer.key_offset = layout_.KeyOffset(kLayer, 0, 0);
    layer.head_stride = layout_.head_stride;
    layer.slot_stride = layout_.slot_stride;
    return KeyRows(layer);
  }

  // Zeros of both signs and infinities among the keys, for minima NaN too. Not both infinities for
  // means, and none for variances: the bits of the NaN that fp32 makes of them are the processor's
  // choice.
  void AddSpecials(std::mt19937_64& rng) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const bool min_max = index_.kind == IndexLayout::Kind::kMinMax;
    const bool deviation = index_.kind == IndexLayout::Kind::kDeviation;
    const float specials[] = {0.0f, -0.0f, deviation ? 700.0f : kInf, min_max ? -kInf : 1.0f,
                              min_max ? NAN : 2.0f};
    std::vector<std::byte>& bytes = pages_->host();
    for (size_t i = 0; i < bytes.size(); i += 2) {
      if (rng() % 16 == 0) StoreFloat(&bytes[i], geometry_.dtype, specials[rng() % 5]);
    }
    pages_->Upload();
  }

  void Reference(const SummarizeBatch& batch, int level, int b, int h, int32_t unit) {
    SummarizeWork w;
    const bool means = batch.kind == SummarizeBatch::Kind::kMean;
    w.kind = means                                            ? SummarizeWork::Kind::kMean
             : batch.kind == SummarizeBatch::Kind::kDeviation ? SummarizeWork::Kind::kDeviation
                                                              : SummarizeWork::Kind::kMinMax;
    w.keys = level > 0 ? index_.Rows(blocks_->TableOf(b), level - 1, kLayer, 0, h)
                       : KeysOf(pages_->TableOf(b), layout_, kLayer, h);
    w.rows = {unit * batch.unit_rows, (unit + 1) * batch.unit_rows};
    w.out = index_.Row(blocks_->TableOf(b), level, kLayer, 0, h, unit);
    if (!means) w.out2 = index_.Row(blocks_->TableOf(b), level, kLayer, 1, h, unit);
    w.out_dtype = index_.dtype;
    SummarizeRef(&w, 1, InlineExecutor());
  }

  Geometry geometry_;
  PageLayout layout_;
  IndexLayout index_;
  std::unique_ptr<ScatteredPages> pages_, blocks_;
  DeviceArray<int32_t> from_, to_;
};

class SummarizeCudaRows : public testing::TestWithParam<IndexLayout::Kind> {};

TEST_P(SummarizeCudaRows, OfTheKeysDTypeAreTheReference) {
  std::mt19937_64 rng(TestSeed());
  for (const int head_dim : {64, 128, 256}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const Geometry g{2, 6, 3, head_dim, 16, dtype};
      SummarizeCase c(GetParam(), g, {8 << rng() % 4}, dtype, rng);
      // Ranges that begin and end inside units; the last completes none.
      const std::vector<int32_t> from = {0, static_cast<int32_t>(rng() % 2000), 17};
      const std::vector<int32_t> to = {4500, static_cast<int32_t>(2000 + rng() % 2000), 18};
      c.SetRange(from, to);
      ASSERT_EQ(kvs_cuda_ops()->summarize(c.WorkOf(0), nullptr), 0);
      c.ExpectReference(0, from, to);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SummarizeCudaRows,
                         testing::Values(IndexLayout::Kind::kMinMax,
                                         IndexLayout::Kind::kDeviation));

TEST(SummarizeCuda, MeansOfEveryLevelAreTheReference) {
  std::mt19937_64 rng(TestSeed());
  for (const int head_dim : {64, 128, 256}) {
    for (const DType mean_dtype : {DType::kBF16, DType::kF32}) {
      const Geometry g{2, 6, 3, head_dim, 32, rng() % 2 == 0 ? DType::kBF16 : DType::kF16};
      SummarizeCase c(IndexLayout::Kind::kMean, g, {32, 256}, mean_dtype, rng);
      c.SetRange({0, 700, 31}, {4500, 3000, 33});
      ASSERT_EQ(kvs_cuda_ops()->summarize(c.WorkOf(0), nullptr), 0);
      c.ExpectReference(0, {0, 700, 31}, {4500, 3000, 33});
      c.SetRange({0, 16, 8}, {140, 93, 15});
      ASSERT_EQ(kvs_cuda_ops()->summarize(c.WorkOf(1), nullptr), 0);
      c.ExpectReference(1, {0, 16, 8}, {140, 93, 15});
    }
  }
}

TEST(SummarizeCuda, OneGraphServesEveryRange) {
  std::mt19937_64 rng(TestSeed());
  const Geometry g{2, 8, 2, 128, 16, DType::kBF16};
  SummarizeCase c(IndexLayout::Kind::kMinMax, g, {16}, g.dtype, rng);
  const SummarizeBatch work = c.WorkOf(0);
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->summarize(work, stream); });
  for (int32_t at = 0; at < 4000; at += 1000) {
    const std::vector<int32_t> from = {at, at / 2, 0}, to = {at + 1000, at / 2 + 500, 0};
    c.SetRange(from, to);
    graph.Replay();
    c.ExpectReference(0, from, to);
  }
}

}  // namespace
}  // namespace kvstrata::cuda
