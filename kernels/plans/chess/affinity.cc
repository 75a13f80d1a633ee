// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/chess/affinity.h"

#include <algorithm>
#include <span>

namespace kvstrata {
namespace {

constexpr int kMaxDim = 256;
using Vector = std::array<float, kMaxDim>;  // the first head_dim channels are used

// Unit counts of one moment.
struct Counts {
  Counts(const IndexLayout& index, int32_t tokens) {
    page_tokens = index.levels[0].unit_tokens;
    pages_per_chunk = index.levels[1].unit_tokens / page_tokens;
    chunks_per_grid = index.levels[2].unit_tokens / index.levels[1].unit_tokens;
    filling_tokens = tokens % page_tokens;
    complete = {tokens / page_tokens, index.UnitsFor(1, tokens), index.UnitsFor(2, tokens)};
    units[0] = complete[0];
    units[1] = (units[0] + pages_per_chunk - 1) / pages_per_chunk;
    units[2] = (units[1] + chunks_per_grid - 1) / chunks_per_grid;
  }
  int32_t total() const { return units[0] + units[1] + units[2]; }

  int32_t page_tokens, pages_per_chunk, chunks_per_grid;
  int32_t filling_tokens;           // in the page after the last complete one
  std::array<int32_t, 3> complete;  // with a stored row
  std::array<int32_t, 3> units;     // to be scored: at most one more of a level
};

// The work of one (layer, KV head): its part of every unit's dot product.
class HeadAffinity {
 public:
  HeadAffinity(const SelectContext& context, const Counts& counts, int layer, int head)
      : context_(context),
        counts_(counts),
        index_(*context.index),
        layer_(layer),
        head_(head),
        dim_(context.geometry->head_dim) {}

  // out [counts.total()], level by level.
  void Score(const AffinityRequest& request, float* out) const {
    if (request.q != nullptr) {
      const int32_t group = context_.geometry->group();
      return ScoreBy(request.q + int64_t{head_} * group * dim_, group, out);
    }
    Vector anchor = MeanOfPages(request.window_start, true);
    if (!request.centred) return ScoreBy(anchor.data(), 1, out);
    // (a - m).(v - m) = (a - m).v - (a - m).m
    const Vector mean = MeanOfPages(0, false);
    for (int c = 0; c < dim_; ++c) anchor[c] -= mean[c];
    const float constant = Dot(anchor.data(), mean);
    ScoreBy(anchor.data(), 1, out);
    for (float* score = out; score < out + counts_.total(); ++score) *score -= constant;
  }

 private:
  // By the largest product with one of the anchors, [count][head_dim].
  void ScoreBy(const float* anchors, int32_t count, float* out) const {
    std::array<ScoreWork, 3> works;
    for (int level = 0; level < 3; ++level) {
      ScoreWork& w = works[level];
      w.kind = ScoreWork::Kind::kDot;
      w.q = anchors;
      w.queries = count;
      w.rows = index_.Rows(context_.view.index_blocks, level, layer_, 0, head_);
      w.units = {0, counts_.complete[level]};
      w.out = out;
      out += counts_.complete[level];
      if (counts_.units[level] > counts_.complete[level]) {
        *out++ = LargestDot(anchors, count, Filling(level));
      }
    }
    for (const ScoreWork& w : works) {
      // Inline: this already runs inside a ParallelFor.
      if (w.units.end > 0) context_.backend->score(&w, 1, InlineExecutor());
    }
  }

  void AddStored(int level, int32_t unit, Vector* sum) const {
    const auto* row = reinterpret_cast<const BF16*>(
        index_.Row(context_.view.index_blocks, level, layer_, 0, head_, unit));
    for (int c = 0; c < dim_; ++c) (*sum)[c] += ToFloat(row[c]);
  }

  void Divide(int32_t count, Vector* sum) const {
    for (int c = 0; c < dim_; ++c) (*sum)[c] /= static_cast<float>(count);
  }

  void Round(Vector* v) const {
    for (int c = 0; c < dim_; ++c) (*v)[c] = ToFloat(FromFloat<BF16>((*v)[c]));
  }

  // Unrounded fp32 mean of the vectors of the pages from `first` on, in order
  // (docs/spec/chess.md 2).
  Vector MeanOfPages(int32_t first, bool with_filling) const {
    Vector sum{};
    for (int32_t page = first; page < counts_.units[0]; ++page) AddStored(0, page, &sum);
    int32_t count = counts_.units[0] - first;
    if (with_filling && counts_.filling_tokens > 0) {
      const Vector mean = FillingPage();
      for (int c = 0; c < dim_; ++c) sum[c] += mean[c];
      ++count;
    }
    Divide(count, &sum);
    return sum;
  }

  // fp32 mean of the tokens of the page that is filling.
  Vector FillingPage() const {
    Vector mean{};
    SummarizeWork w;
    w.kind = SummarizeWork::Kind::kMean;
    w.keys = KeysOf(context_.view.pages, context_.layout, layer_, head_);
    const int32_t begin = counts_.units[0] * counts_.page_tokens;
    w.rows = {begin, begin + counts_.filling_tokens};
    w.out = reinterpret_cast<std::byte*>(mean.data());
    w.out_dtype = DType::kF32;
    context_.backend->summarize(&w, 1, InlineExecutor());
    return mean;
  }

  // The vector of the last chunk or grid, over what is there of it.
  Vector Filling(int level) const {
    const int32_t size = level == 1 ? counts_.pages_per_chunk : counts_.chunks_per_grid;
    const int32_t begin = (counts_.units[level] - 1) * size;
    Vector sum{};
    for (int32_t child = begin; child < counts_.complete[level - 1]; ++child) {
      AddStored(level - 1, child, &sum);
    }
    if (counts_.units[level - 1] > counts_.complete[level - 1]) {
      const Vector child = Filling(level - 1);
      for (int c = 0; c < dim_; ++c) sum[c] += child[c];
    }
    Divide(counts_.units[level - 1] - begin, &sum);
    Round(&sum);
    return sum;
  }

  float LargestDot(const float* anchors, int32_t count, const Vector& v) const {
    float largest = Dot(anchors, v);
    for (int32_t i = 1; i < count; ++i) {
      largest = std::max(largest, Dot(anchors + int64_t{i} * dim_, v));
    }
    return largest;
  }

  float Dot(const float* a, const Vector& b) const {
    double sum = 0;
    for (int c = 0; c < dim_; ++c) sum += double{a[c]} * double{b[c]};
    return static_cast<float>(sum);
  }

  const SelectContext& context_;
  const Counts& counts_;
  const IndexLayout& index_;
  const int layer_, head_, dim_;
};

// A sum of thousands of channels: fp32 within a head, double across heads, in their order.
// parts [heads][total]
AffinityScores Sum(const Counts& counts, std::span<const float> parts) {
  const size_t total = counts.total();
  std::vector<double> sums(total);
  for (size_t i = 0; i < parts.size(); ++i) sums[i % total] += parts[i];
  AffinityScores scores;
  auto at = sums.begin();
  for (int level = 0; level < 3; ++level) {
    scores[level].assign(at, at + counts.units[level]);
    at += counts.units[level];
  }
  return scores;
}

}  // namespace

std::vector<AffinityScores> ScoreAffinity(const SelectContext& context,
                                          const AffinityRequest& request) {
  using Lists = CascadeOptions::Lists;
  const Counts counts(*context.index, request.tokens);
  const int32_t kv_heads = context.geometry->kv_heads;
  const int64_t heads = int64_t{request.layers.end - request.layers.begin} * kv_heads;
  const int64_t total = counts.total();
  std::vector<float> parts(static_cast<size_t>(heads * total));  // [layer, head][unit]
  context.executor->ParallelFor(heads, [&](int64_t i) {
    const int layer = request.layers.begin + static_cast<int>(i / kv_heads);
    HeadAffinity(context, counts, layer, static_cast<int>(i % kv_heads))
        .Score(request, parts.data() + i * total);
  });
  const int64_t shared = request.lists == Lists::kModel   ? heads
                         : request.lists == Lists::kLayer ? kv_heads
                                                          : 1;  // heads of a list
  std::vector<AffinityScores> scores;
  for (int64_t i = 0; i < heads; i += shared) {
    scores.push_back(Sum(counts, {parts.data() + i * total, static_cast<size_t>(shared * total)}));
  }
  return scores;
}

}  // namespace kvstrata
