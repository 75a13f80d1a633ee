// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sentencekv/importance.h"

#include <algorithm>
#include <limits>

namespace kvstrata {
namespace {

constexpr int64_t kScoreFloats = int64_t{8} << 20;  // scores in flight
constexpr int32_t kScoreTile = 2048;                // rows that one work item scores

// The work of one (layer, KV head).
class HeadImportance {
 public:
  HeadImportance(const SelectContext& context, int layer, int head, const float* q, int32_t window,
                 int32_t tokens)
      : context_(context), window_(window), tokens_(tokens) {
    const Geometry& g = *context.geometry;
    keys_ = KeysOf(context.view.pages, context.layout, layer, head);
    queries_.resize(int64_t{g.group()} * window * g.head_dim);
    float* to = queries_.data();
    for (int i = 0; i < g.group(); ++i) {
      for (int32_t t = 0; t < window; ++t, to += g.head_dim) {
        const int64_t from = int64_t{t} * g.query_heads + head * g.group() + i;
        std::copy_n(q + from * g.head_dim, g.head_dim, to);
      }
    }
  }

  // Adds what the queries [begin, end) of the group's [group][window] pay to out.
  void Add(int32_t begin, int32_t end, float* out) {
    const int32_t step = static_cast<int32_t>(
        std::clamp<int64_t>(kScoreFloats / std::max(tokens_, 1), 1, end - begin));
    for (int32_t first = begin; first < end; first += step) {
      const int32_t count = std::min(step, end - first);
      Score(first, count);
      votes_.resize(tokens_);
      max_.resize(count);
      sum_.resize(count);
      context_.backend->vote(
          {logits_.data(), tokens_, count, tokens_, max_.data(), sum_.data(), votes_.data()},
          *context_.executor);
      for (int32_t t = 0; t < tokens_ - window_; ++t) out[t] += votes_[t];
    }
  }

 private:
  // Logits of `count` queries over all tokens; what a query does not see weighs nothing.
  void Score(int32_t first, int32_t count) {
    const int32_t dim = context_.geometry->head_dim;
    logits_.resize(int64_t{count} * tokens_);
    works_.clear();
    for (int32_t t = 0; t < tokens_; t += kScoreTile) {
      ScoreTokensWork& w = works_.emplace_back();
      w.rows = keys_;
      w.run = {t, std::min(t + kScoreTile, tokens_)};
      w.q = queries_.data() + int64_t{first} * dim;
      w.queries = count;
      w.scale = context_.geometry->logit_scale();
      w.out = logits_.data() + t;
      w.out_query = tokens_;
    }
    context_.backend->score_tokens(works_.data(), static_cast<int64_t>(works_.size()),
                                   *context_.executor);
    for (int32_t i = 0; i < count; ++i) {
      float* row = logits_.data() + int64_t{i} * tokens_;
      const int32_t seen = tokens_ - window_ + (first + i) % window_ + 1;
      std::fill(row + seen, row + tokens_, -std::numeric_limits<float>::infinity());
    }
  }

  const SelectContext& context_;
  const int32_t window_, tokens_;
  PagedRows keys_;
  std::vector<float> queries_;  // [group][window][dim]
  std::vector<ScoreTokensWork> works_;
  std::vector<float> logits_, votes_, max_, sum_;
};

}  // namespace

void ObservedRange::Add(int32_t first, int32_t count, int32_t capacity) {
  if (first != end) begin = first;
  end = first + count;
  begin = std::max(begin, end - capacity);
}

bool ObservedRange::Cover(int32_t tokens, int32_t capacity) const {
  return end == tokens && end - begin >= std::min(capacity, tokens);
}

void ObservedQueries::Add(int layer, const float* q, int64_t q_token, int32_t first,
                          int32_t count) {
  Layer& own = layers_[layer];
  own.rows.resize(capacity_ * RowFloats());
  for (int32_t t = std::max(0, count - capacity_); t < count; ++t) {
    std::copy_n(q + t * q_token, RowFloats(),
                own.rows.data() + (first + t) % capacity_ * RowFloats());
  }
  own.held.Add(first, count, capacity_);
}

bool ObservedQueries::Cover(int layer, int32_t tokens) const {
  return layers_[layer].held.Cover(tokens, capacity_);
}

std::vector<float> ObservedQueries::Queries(int layer, int32_t tokens) const {
  const int32_t count = std::min(capacity_, tokens);
  std::vector<float> queries(count * RowFloats());
  for (int32_t i = 0; i < count; ++i) {
    std::copy_n(layers_[layer].rows.data() + (tokens - count + i) % capacity_ * RowFloats(),
                RowFloats(), queries.data() + i * RowFloats());
  }
  return queries;
}

std::vector<float> TokenImportance(const SelectContext& context, int layer, const float* q,
                                   int32_t window, int32_t tokens, bool per_query_head) {
  const Geometry& g = *context.geometry;
  const int64_t before = tokens - window;
  std::vector<float> importance(before * (per_query_head ? g.query_heads : g.kv_heads));
  float* out = importance.data();
  for (int head = 0; head < g.kv_heads; ++head) {
    HeadImportance work(context, layer, head, q, window, tokens);
    if (!per_query_head) {
      work.Add(0, g.group() * window, out);
      out += before;
    }
    for (int32_t i = 0; per_query_head && i < g.group(); ++i, out += before) {
      work.Add(i * window, (i + 1) * window, out);
    }
  }
  return importance;
}

}  // namespace kvstrata
