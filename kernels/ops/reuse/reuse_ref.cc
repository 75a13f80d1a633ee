// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/ops/elements.h"
#include "kernels/ops/reuse/reuse.h"

namespace kvstrata::cuda {
namespace {

// A sequence's cache in a layer.
struct Picks {
  std::byte* At(int pick) const { return memory + pick * layout.pick_bytes(); }
  int32_t& Made(int pick) const { return *reinterpret_cast<int32_t*>(At(pick)); }
  float* Query(int pick) const { return reinterpret_cast<float*>(At(pick) + layout.query_at()); }
  uint64_t List(int pick) const { return reinterpret_cast<uint64_t>(At(pick) + layout.list_at()); }
  // The pick that counts in a step of `tokens`; -1: none.
  int Last(int32_t tokens) const {
    int last = -1;
    for (int i = 0; i < 2; ++i) {
      const bool counts = Made(i) > 0 && Made(i) < tokens;
      if (counts && (last < 0 || Made(i) > Made(last))) last = i;
    }
    return last;
  }

  PickCacheLayout layout;
  std::byte* memory;
};

double Cosine(const float* a, const void* b, DType dtype, int64_t at, int64_t count) {
  double dot = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = a[i], y = ElementAt(b, dtype, at + i);
    dot += x * y;
    aa += x * x;
    bb += y * y;
  }
  const double norms = std::sqrt(aa) * std::sqrt(bb);
  return norms > 0 ? dot / norms : 0;
}

bool IsAlike(const Reuse& work, const ReuseQueries& q, int sequence, const float* then) {
  const int64_t floats = int64_t{q.heads} * q.head_dim, each = work.per_head ? q.head_dim : floats;
  for (int64_t i = 0; i < floats; i += each) {
    const double cosine = Cosine(then + i, q.q, q.dtype, sequence * floats + i, each);
    if (cosine < work.theta) return false;
  }
  return true;
}

void Decide(const Reuse& work, const CandidateRule& rule, const ReuseQueries& q, int b) {
  const int32_t tokens = work.tokens[b];
  work.voting[b] = tokens;
  const Candidates units = CandidatesOf(rule, tokens);
  if (units.full) return;
  const PickCacheLayout layout{int64_t{q.heads} * q.head_dim, rule.take};
  const Picks picks{
      layout, reinterpret_cast<std::byte*>(work.caches[b]) + work.layer * layout.layer_bytes()};
  const int last = picks.Last(tokens);
  if (last < 0 || work.theta >= 1 || !IsAlike(work, q, b, picks.Query(last))) {
    const int pick = last == 0 ? 1 : 0;
    picks.Made(pick) = tokens;
    for (int64_t i = 0; i < layout.query_floats; ++i) {
      picks.Query(pick)[i] = ElementAt(q.q, q.dtype, b * layout.query_floats + i);
    }
    work.lists[b] = picks.List(pick);
    return;
  }
  work.voting[b] = kNoQuery;
  work.lists[b] = picks.List(last);
  if (picks.Made(1 - last) >= tokens) picks.Made(1 - last) = 0;  // a step that was given up made it
  work.counts[b] = rule.take;
  work.sink_end[b] = units.first;
  work.recent_begin[b] =
      work.append_departed ? CandidatesOf(rule, picks.Made(last)).last : units.last;
}

}  // namespace

void ReuseRef(const Reuse& work, const CandidateRule& rule, const ReuseQueries& queries) {
  for (int b = 0; b < queries.batch; ++b) Decide(work, rule, queries, b);
}

}  // namespace kvstrata::cuda
