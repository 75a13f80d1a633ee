// SPDX-License-Identifier: Apache-2.0
// A selector on its own: what a step calls of it, one call at a time, on a sequence whose pages and
// index are this process's memory. Oracles of its tests are in double precision, so choices count
// only where fp32 noise cannot turn them.
//
// Threads: none of it is shared.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/kernels/held_sequence.h"

namespace kvstrata {

using Ints = std::vector<int32_t>;
using Doubles = std::vector<double>;

// Keys of `in` in pages, and a selector of `plan` over them.
class Selecting {
 public:
  Selecting(const Inputs& in, const std::string& plan, const Backend& backend)
      : in_(in),
        plan_(PlanOf(plan)),
        backend_(backend),
        held_(in.g, plan),
        selector_(NewSelector(plan_, in.g)) {}
  // A fork.
  Selecting(const Selecting& other)
      : boundary(other.boundary),
        reported_boundaries(other.reported_boundaries),
        in_(other.in_),
        plan_(other.plan_),
        backend_(other.backend_),
        held_(other.held_),
        selector_(other.selector_->Clone()),
        tokens_(other.tokens_),
        prompt_(other.prompt_) {}

  // Appends up to `end` tokens as prompt, in chunks, and lets the selector observe their queries.
  void Prompt(int32_t end, int32_t chunk = 64) {
    while (tokens_ < end) {
      const int32_t n = std::min(chunk, end - tokens_);
      Hold(tokens_ + n);
      for (int layer = 0; layer < in_.g.layers; ++layer) {
        Selection ignored;
        selector_->SelectChunk(Context(), layer, Queries(layer, n), &ignored);
      }
      tokens_ += n;
    }
  }
  // Appends up to `end` tokens that nobody observes: a prefix that was held.
  void Skip(int32_t end) {
    Hold(end);
    tokens_ = end;
  }
  void PrefillDone() {
    Begin();
    prompt_ = tokens_;
    if (selector_->history() != nullptr) selector_->history()->PrefillDone(Context());
  }
  void Begin() {
    if (selector_->history() != nullptr) selector_->history()->Begin(Context());
  }
  // The selection for the token at tokens(), whose key is in its page already.
  Selection Select(int layer) {
    Hold(tokens_ + 1);
    Selection s;
    selector_->Select(Context(), layer, in_.Query(tokens_, layer, 0), &s);
    return s;
  }
  void Advance(int32_t count = 1) {
    Hold(tokens_ + count);
    if (selector_->history() != nullptr) selector_->history()->Advance(count);
    tokens_ += count;
  }
  // A whole step of one token: the selections by layer.
  std::vector<Selection> Step() {
    Begin();
    std::vector<Selection> all;
    for (int layer = 0; layer < in_.g.layers; ++layer) all.push_back(Select(layer));
    Advance();
    return all;
  }
  // Selection of the prompt chunk [tokens(), + count); false: in full.
  bool SelectChunk(int layer, int32_t count, Selection* out) {
    return selector_->SelectChunk(Context(), layer, Queries(layer, count), out);
  }
  std::string StatusText() { return selector_->StatusText(Context()); }
  Result<InspectArray> Inspect(const std::string& name) {
    return selector_->Inspect(Context(), name);
  }
  template <typename T>
  std::vector<T> Array(const std::string& name) {
    const Result<InspectArray> array = Inspect(name);
    EXPECT_TRUE(array.ok()) << array.status().ToString();
    if (!array.ok()) return {};
    std::vector<T> values(array->bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
    return values;
  }

  SelectContext Context() {
    SelectContext c;
    c.geometry = &in_.g;
    c.layout = PageLayout::Of(in_.g);
    c.index = &held_.state->index();
    c.view = held_.View();
    c.view.tokens = tokens_;
    c.backend = &backend_;
    c.executor = executor;
    const auto reported = std::min<size_t>(boundary.size(), reported_boundaries);
    c.boundary = {boundary.data(), std::min<size_t>(reported, tokens_)};
    c.prompt_tokens = prompt_;
    c.stored = stored;
    return c;
  }

  int32_t tokens() const { return tokens_; }
  const Plan& plan() const { return plan_; }
  HeldSequence& held() { return held_; }

  std::vector<uint8_t> boundary;          // by position
  size_t reported_boundaries = SIZE_MAX;  // how many of them are reported
  const StoredRows* stored = nullptr;
  Executor* executor = &InlineExecutor();

 private:
  PromptQueries Queries(int layer, int32_t count) const {
    const int64_t floats = int64_t{in_.g.layers} * in_.g.query_heads * in_.g.head_dim;
    return {in_.Query(tokens_, layer, 0), floats, tokens_, count};
  }
  void Hold(int32_t end) {
    RunTo(held_, in_, end, 64, backend_);
    Settle(held_, backend_);
  }

  const Inputs& in_;
  Plan plan_;
  const Backend& backend_;
  HeldSequence held_;
  std::unique_ptr<Selector> selector_;
  int32_t tokens_ = 0, prompt_ = -1;
};

inline Ints Upto(int32_t begin, int32_t end) {
  Ints range;
  for (int32_t i = std::max(begin, 0); i < end; ++i) range.push_back(i);
  return range;
}

inline Ints UnionOf(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

// Indices in descending score; equal scores keep the lower index first.
inline Ints Ranking(const Doubles& scores) {
  Ints order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  return order;
}

inline Ints TopK(const Doubles& scores, int32_t k) {
  Ints order = Ranking(scores);
  order.resize(std::min<size_t>(order.size(), std::max(k, 0)));
  std::sort(order.begin(), order.end());
  return order;
}

// Whether no two scores that follow each other in rank are closer than fp32 noise, down to rank k.
inline bool IsStable(Doubles scores, int32_t k, double noise = 1e-5) {
  if (k <= 0 || k >= static_cast<int32_t>(scores.size())) return true;
  std::sort(scores.rbegin(), scores.rend());
  const double largest = std::max(std::abs(scores.front()), std::abs(scores.back()));
  return scores[k - 1] - scores[k] > noise * largest;
}

inline double Dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

inline Doubles Softmax(Doubles x) {
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - max);
  for (double& v : x) v /= sum;
  return x;
}

inline Doubles MaxPooled(const Doubles& x, int width) {
  Doubles pooled(x.size());
  const int n = static_cast<int>(x.size());
  for (int t = 0; t < n; ++t) {
    const int low = std::max(t - (width - 1) / 2, 0), high = std::min(t + width / 2, n - 1);
    pooled[t] = *std::max_element(x.begin() + low, x.begin() + high + 1);
  }
  return pooled;
}

}  // namespace kvstrata
