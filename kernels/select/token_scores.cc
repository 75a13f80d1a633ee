// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/token_scores.h"

#include <algorithm>

#include "kernels/rows/stored_rows.h"

namespace kvstrata {
namespace {

// Rows that one work item scores.
constexpr int32_t kScoreTile = 2048;

// The first position of `range` that is not held by a codec.
int32_t FirstOnPages(const SelectContext& context, Run range) {
  if (context.stored == nullptr) return range.begin;
  return std::clamp(context.stored->end(), range.begin, std::max(range.begin, range.end));
}

}  // namespace

void TokenScores::Score(const SelectContext& context, int layer, const float* q, Run heads,
                        Run range, float scale, float* out, int64_t stride) {
  const Geometry& g = *context.geometry;
  const int32_t first_on_pages = FirstOnPages(context, range);
  works_.Clear();
  for (int head = heads.begin; head < heads.end; ++head) {
    float* const own = out + int64_t{head - heads.begin} * g.group() * stride;
    const float* const queries = q + int64_t{head} * g.group() * g.head_dim;
    if (range.begin < first_on_pages) {
      context.stored->AddScores(
          {layer, head, {range.begin, first_on_pages}, queries, g.group(), scale, own, stride},
          &works_);
    }
    for (int32_t t = first_on_pages; t < range.end; t += kScoreTile) {
      ScoreTokensWork w;
      w.rows = KeysOf(context.view.pages, context.layout, layer, head);
      w.run = {t, std::min(t + kScoreTile, range.end)};
      w.q = queries;
      w.queries = g.group();
      w.scale = scale;
      w.out = own + (t - range.begin);
      w.out_query = stride;
      works_.Add(w);
    }
  }
  works_.Score(*context.backend, *context.executor);
}

int64_t KeyBytes(const SelectContext& context, int layer, Run range) {
  const Geometry& g = *context.geometry;
  const int32_t first_on_pages = FirstOnPages(context, range);
  const int64_t stored = range.begin < first_on_pages
                             ? context.stored->KeyBytes(layer, {range.begin, first_on_pages})
                             : 0;
  return stored + std::max(0, range.end - first_on_pages) * g.kv_heads * g.row_bytes();
}

}  // namespace kvstrata
