// SPDX-License-Identifier: Apache-2.0
// The queries that share one pass over an item's rows, where the output rows of a query token may
// lie further apart than its heads (row_token); for attend_coarse and attend_lowrank. Included once
// per Highway target.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_COARSE_QUERY_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_COARSE_QUERY_PASS_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_COARSE_QUERY_PASS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_COARSE_QUERY_PASS_INL_H_
#endif

#include <algorithm>

#include "kernels/ops/attend_coarse/weighted_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

struct QueryPass {
  static constexpr int kQueries = 16;
  static constexpr int kStates = kQueries / kHeads;

  int first = 0, count = 0;  // rows among the item's queries * group
  int dim = 0;
  alignas(64) float q[kQueries * kHeadDimMax];  // [count][dim], scaled, in T's pair order
  alignas(64) float o[kQueries * kHeadDimMax];  // [count][dim], in T's pair order
  DecodeState states[kStates];                  // kHeads queries each

  HWY_INLINE int StateCount() const { return (count + kHeads - 1) / kHeads; }
  HWY_INLINE int Heads(int s) const { return std::min(count - s * kHeads, kHeads); }
};

template <typename T, class Work>
HWY_INLINE void OpenQueries(const Work& w, int first, int dim, QueryPass& pass) {
  pass.first = first;
  pass.count = std::min(QueryPass::kQueries, w.queries * w.group - first);
  pass.dim = dim;
  for (int i = 0; i < pass.count; ++i) {
    const int at = first + i;
    const float* from = w.q + at / w.group * w.q_token + int64_t{at % w.group} * dim;
    float* to = pass.q + i * dim;
    ToPairOrder<T>(from, to, dim);
    for (int c = 0; c < dim; ++c) to[c] *= w.scale;
  }
  for (int s = 0; s < pass.StateCount(); ++s) {
    pass.states[s].q = pass.q + s * kHeads * dim;
    pass.states[s].o = pass.o + s * kHeads * dim;
    ClearState(pass.Heads(s), dim, pass.states[s]);
  }
}

template <typename T, class Work>
HWY_INLINE void CloseQueries(const Work& w, QueryPass& pass) {
  for (int i = 0; i < pass.count; ++i) {
    const int at = pass.first + i;
    const int64_t row = int64_t{at / w.group} * w.row_token + at % w.group;
    const DecodeState& st = pass.states[i / kHeads];
    w.m[row] = st.m[i % kHeads * kRows];
    w.l[row] = SumOfWeights(st, i % kHeads);
    FromPairOrder<T>(pass.o + i * pass.dim, pass.dim);
    std::copy_n(pass.o + i * pass.dim, pass.dim, w.o + row * pass.dim);
  }
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_COARSE_QUERY_PASS_INL_H_
