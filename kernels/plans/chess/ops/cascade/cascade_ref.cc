// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/plans/chess/ops/cascade/cascade.h"

namespace kvstrata::cuda {
namespace {

using Vector = std::vector<float>;  // a unit's: all layers and heads in one

// The vectors of one sequence's units.
class Units {
 public:
  Units(const CascadeBatch& w, int sequence)
      : w_(w), sequence_(sequence), tokens_(w.tokens[sequence]) {
    const int32_t pages = tokens_ / w.page_tokens;
    complete_ = {pages, pages / w.pages_per_chunk, pages / w.pages_per_chunk / w.chunks_per_grid};
    units_[0] = pages;
    units_[1] = (pages + w.pages_per_chunk - 1) / w.pages_per_chunk;
    units_[2] = (units_[1] + w.chunks_per_grid - 1) / w.chunks_per_grid;
  }
  int32_t count(int level) const { return units_[static_cast<size_t>(level)]; }
  int32_t window_start() const {
    const int32_t pages = (tokens_ + w_.page_tokens - 1) / w_.page_tokens;
    return std::max(pages - w_.window, 0);
  }
  // Sums in fp32 in order, as op summarize has them; of units that are filling rounded likewise.
  Vector Of(int level, int32_t unit) const {
    if (unit < complete_[static_cast<size_t>(level)]) return Stored(level, unit);
    const int32_t size = level == 1 ? w_.pages_per_chunk : w_.chunks_per_grid;
    Vector mean = MeanOf(level - 1, unit * size, count(level - 1), Vector());
    for (float& x : mean) x = ToFloat(FromFloat<BF16>(x));
    return mean;
  }
  Vector Anchor() const { return MeanOf(0, window_start(), count(0), FillingPage()); }

 private:
  int64_t heads() const { return int64_t{w_.layers} * w_.keys.kv_heads; }
  Vector Stored(int level, int32_t unit) const {
    const DeviceRows& rows = w_.levels[level];
    Vector v;
    for (int64_t h = 0; h < heads(); ++h) {
      const std::byte* const row = RowAt(rows, sequence_, h * rows.head_stride, unit);
      for (int c = 0; c < rows.head_dim; ++c) v.push_back(ElementAt(row, rows.dtype, c));
    }
    return v;
  }
  // The mean of units [first, last) and, if there is one, another vector.
  Vector MeanOf(int level, int32_t first, int32_t last, const Vector& more) const {
    Vector sum(static_cast<size_t>(heads() * w_.keys.head_dim));
    auto n = static_cast<float>(last - first);
    const auto add = [&sum](const Vector& v) {
      std::ranges::transform(sum, v, sum.begin(), std::plus());
    };
    for (int32_t u = first; u < last; ++u) add(Of(level, u));
    if (!more.empty()) {
      add(more);
      ++n;
    }
    for (float& x : sum) x /= n;
    return sum;
  }
  // The mean of the tokens behind the last complete page; empty if there are none.
  Vector FillingPage() const {
    const int32_t begin = count(0) * w_.page_tokens;
    Vector mean;
    for (int64_t h = 0; h < heads() && begin < tokens_; ++h) {
      const int64_t head =
          h / w_.keys.kv_heads * w_.key_layer_stride + h % w_.keys.kv_heads * w_.keys.head_stride;
      for (int c = 0; c < w_.keys.head_dim; ++c) {
        float sum = 0;
        for (int32_t t = begin; t < tokens_; ++t) {
          sum += ElementAt(RowAt(w_.keys, sequence_, head, t), w_.keys.dtype, c);
        }
        mean.push_back(sum / static_cast<float>(tokens_ - begin));
      }
    }
    return mean;
  }

  const CascadeBatch& w_;
  const int sequence_;
  const int32_t tokens_;
  std::array<int32_t, 3> complete_, units_;  // with a stored row; all that are scored
};

// The best of a level's units [begin, end) whose parent is kept, ascending.
std::vector<int32_t> Best(const std::vector<float>& scores, double share,
                          const std::vector<int32_t>& parents, int32_t size, Run range) {
  std::vector<int32_t> units;
  std::vector<float> own;
  for (int32_t u = range.begin; u < range.end; ++u) {
    if (!parents.empty() && !std::ranges::binary_search(parents, u / size)) continue;
    units.push_back(u);
    own.push_back(scores[static_cast<size_t>(u)]);
  }
  const auto n = static_cast<int32_t>(units.size());
  std::vector<int32_t> best(static_cast<size_t>(CeilShare(share, n)));
  TopKRef({own.data(), n, static_cast<int32_t>(best.size()), best.data()});
  for (int32_t& i : best) i = units[static_cast<size_t>(i)];
  return best;
}

}  // namespace

std::vector<CascadeScores> ScoreCascadeRef(const CascadeBatch& w) {
  std::vector<CascadeScores> all(static_cast<size_t>(w.batch));
  for (int b = 0; b < w.batch; ++b) {
    if (w.tokens[b] < 0) continue;
    const Units units(w, b);
    const Vector anchor = units.Anchor();
    for (int level = 0; level < 3; ++level) {
      for (int32_t u = 0; u < units.count(level); ++u) {
        const Vector v = units.Of(level, u);
        double dot = 0;
        for (size_t c = 0; c < v.size(); ++c) dot += double{anchor[c]} * v[c];
        all[static_cast<size_t>(b)][static_cast<size_t>(level)].push_back(static_cast<float>(dot));
      }
    }
  }
  return all;
}

void KeepCascadeRef(const CascadeBatch& w, const std::vector<CascadeScores>& scores) {
  for (int b = 0; b < w.batch; ++b) {
    if (w.tokens[b] < 0) continue;
    const int32_t window_start = Units(w, b).window_start();
    w.counts[b] = 0;
    // A chunk or grid competes if it holds a page that does.
    const Run pages = {std::min(w.sinks, window_start), window_start};
    if (pages.begin >= pages.end) continue;
    const int32_t sizes[] = {w.pages_per_chunk, w.chunks_per_grid, 1};
    const Run chunks = {pages.begin / sizes[0], (pages.end - 1) / sizes[0] + 1};
    const Run ranges[] = {
        pages, chunks, {chunks.begin / sizes[1], (chunks.end - 1) / sizes[1] + 1}};
    std::vector<int32_t> kept;
    for (int level = 2; level >= 0; --level) {
      kept = Best(scores[static_cast<size_t>(b)][static_cast<size_t>(level)], w.rho[2 - level],
                  kept, sizes[level], ranges[level]);
    }
    std::ranges::copy(kept, w.units + int64_t{b} * w.list_stride);
    w.counts[b] = static_cast<int32_t>(kept.size());
  }
}

}  // namespace kvstrata::cuda
