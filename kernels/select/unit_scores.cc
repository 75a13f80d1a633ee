// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/unit_scores.h"

#include <algorithm>

namespace kvstrata {

ScoreWork UnitScores::Work(const SelectContext& context, int layer, int head,
                           ScoreWork::Kind kind) const {
  const IndexLayout& index = *context.index;
  ScoreWork w;
  w.kind = kind;
  w.rows = index.Rows(context.view.index_blocks, 0, layer, 0, head);
  if (kind != ScoreWork::Kind::kDot) {
    w.second_offset = index.RowOffset(0, layer, 1, head, 0) - w.rows.offset;
  }
  return w;
}

void UnitScores::ScoreGroups(const SelectContext& context, int layer, const float* q,
                             ScoreWork::Kind kind, Run units) {
  const Geometry& g = *context.geometry;
  works_.clear();
  for (int head = 0; head < g.kv_heads; ++head) {
    ScoreWork& w = works_.emplace_back(Work(context, layer, head, kind));
    w.q = q + int64_t{head} * g.group() * g.head_dim;
    w.queries = g.group();
    w.units = units;
    w.out = scores_.data() + int64_t{count_} * head;
  }
  context.backend->score(works_.data(), g.kv_heads, *context.executor);
}

void UnitScores::ScoreHeads(const SelectContext& context, int layer, const float* q,
                            ScoreWork::Kind kind, Run units) {
  const Geometry& g = *context.geometry;
  const float scale = g.logit_scale();
  q_.assign(q, q + int64_t{g.query_heads} * g.head_dim);
  for (float& x : q_) x *= scale;
  logits_.resize(int64_t{count_} * g.query_heads);
  works_.clear();
  for (int h = 0; h < g.query_heads; ++h) {
    ScoreWork& w = works_.emplace_back(Work(context, layer, h / g.group(), kind));
    w.q = q_.data() + int64_t{h} * g.head_dim;
    w.units = units;
    w.out = logits_.data() + int64_t{count_} * h;
  }
  context.backend->score(works_.data(), g.query_heads, *context.executor);
  for (int head = 0; head < g.kv_heads; ++head) {
    SumSoftmax(*context.backend, *context.executor,
               logits_.data() + int64_t{count_} * g.group() * head, count_, g.group(), count_,
               scores_.data() + int64_t{count_} * head, &sums_);
  }
}

void UnitScores::Score(const SelectContext& context, int layer, const float* q,
                       ScoreWork::Kind kind, Run units, bool softmax) {
  count_ = std::max(units.end - units.begin, 0);
  scores_.resize(int64_t{count_} * context.geometry->kv_heads);
  if (count_ == 0) return;
  if (softmax) {
    ScoreHeads(context, layer, q, kind, units);
  } else {
    ScoreGroups(context, layer, q, kind, units);
  }
}

void SumSoftmax(const Backend& backend, Executor& executor, float* logits, int64_t stride,
                int32_t heads, int32_t n, float* votes, std::vector<float>* scratch) {
  if (n == 0) return;
  scratch->resize(2 * static_cast<size_t>(heads));
  backend.vote({logits, stride, heads, n, scratch->data(), scratch->data() + heads, votes},
               executor);
}

void AppendRest(Run candidates, const std::vector<int32_t>& chosen, int32_t level,
                std::vector<CoarseRun>* rest) {
  int32_t begin = candidates.begin;
  for (const int32_t unit : chosen) {
    if (unit < candidates.begin || unit >= candidates.end) continue;
    if (begin < unit) rest->push_back({level, {begin, unit}});
    begin = unit + 1;
  }
  if (begin < candidates.end) rest->push_back({level, {begin, candidates.end}});
}

}  // namespace kvstrata
