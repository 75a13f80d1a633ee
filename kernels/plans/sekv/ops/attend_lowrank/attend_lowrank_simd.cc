// SPDX-License-Identifier: Apache-2.0
// Predicted, per span of n tokens at rank r: r (n + dim) fused multiply-adds a query for the keys
// and as many for the values, instead of 2 n dim; the factors are read once for up to 16 queries.
// A span of 32 tokens at rank 16 and dim 128: 5120 instead of 8192 a query.
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank_simd.cc"
#include <algorithm>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_coarse/query_pass-inl.h"
#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kPair = 2 * static_cast<int>(kN);

// Rows of a left factor for kernels that read whole pairs of vectors. A row of `width` elements is
// read up to `padded` of them: the next row's where there is one, else a copy's.
class PaddedRows {
 public:
  HWY_INLINE PaddedRows(const BF16* left, int n, int width)
      : left_(left), width_(width), padded_((width + kPair - 1) / kPair * kPair) {
    // From row `whole_` on, `padded` elements are not there.
    const int64_t total = int64_t{n} * width;
    whole_ = padded_ == width
                 ? n
                 : static_cast<int>(std::max(total - padded_ + width, int64_t{0}) / width);
    std::fill(copies_, copies_ + (n - whole_) * padded_, BF16{});
    for (int i = whole_; i < n; ++i) {
      std::copy_n(left + int64_t{i} * width, width, copies_ + (i - whole_) * padded_);
    }
  }

  HWY_INLINE int padded() const { return padded_; }

  HWY_INLINE const std::byte* Row(int i) const {
    return reinterpret_cast<const std::byte*>(i < whole_ ? left_ + int64_t{i} * width_
                                                         : copies_ + (i - whole_) * padded_);
  }

 private:
  const BF16* left_;
  const int width_, padded_;
  int whole_;
  // Fewer than kPair rows narrower than a pair, or one row.
  BF16 copies_[std::max(kPair * kPair, kMaxRank)];
};

// Coordinates of the state's queries in the span of a right factor's rows: out [H][padded], in pair
// order, zero from `rank` on.
template <int H>
HWY_NOINLINE void ProjectQueries(const LowRankRows& rows, int dim, int padded, float* out,
                                 DecodeState& st) {
  alignas(64) float plain[kHeads * kMaxRank];
  std::fill(plain, plain + H * padded, 0.0f);
  const std::byte* tile[kDecodeTileRows];
  for (int first = 0; first < rows.rank; first += kDecodeTileRows) {
    const int n = std::min(kDecodeTileRows, rows.rank - first);
    for (int j = 0; j < n; ++j) {
      tile[j] = reinterpret_cast<const std::byte*>(rows.right + int64_t{first + j} * dim);
    }
    ScoreRows<BF16, H>(tile, n, st.q, dim, dim, st);
    for (int h = 0; h < H; ++h) {
      for (int j = 0; j < n; ++j) {
        plain[h * padded + first + j] = st.s[j / kRows][h * kRows + j % kRows];
      }
    }
  }
  for (int h = 0; h < H; ++h) ToPairOrder<BF16>(plain + h * padded, out + h * padded, padded);
}

template <int H>
HWY_INLINE void ScaleSums(int dim, DecodeState& st) {
  for (int h = 0; h < H; ++h) {
    const VF alpha = hn::Set(DF(), st.alpha[h * kRows]);
    for (int c = 0; c < dim; c += static_cast<int>(kN)) {
      float* at = st.o + h * dim + c;
      hn::StoreU(hn::Mul(alpha, hn::LoadU(DF(), at)), DF(), at);
    }
  }
}

// One span for one state of H queries. Weights of tokens are summed in the space of the value's
// factor, `u`, and leave it once.
template <int H>
HWY_NOINLINE void AttendSpan(const LowRankSpan& span, const PaddedRows& keys,
                             const PaddedRows& values, int dim, DecodeState& st) {
  alignas(64) float t[kHeads * kMaxRank];
  alignas(64) float u[kHeads * kMaxRank];
  std::fill(u, u + H * values.padded(), 0.0f);
  const float* q = st.q;
  if (span.k.rank >= 0) {
    ProjectQueries<H>(span.k, dim, keys.padded(), t, st);
    q = t;
  }
  const bool factored = span.v.rank >= 0;
  const std::byte* tile[kDecodeTileRows];
  for (int first = 0; first < span.n; first += kDecodeTileRows) {
    const int n = std::min(kDecodeTileRows, span.n - first);
    for (int i = 0; i < n; ++i) tile[i] = keys.Row(first + i);
    ScoreRows<BF16, H>(tile, n, q, keys.padded(), keys.padded(), st);
    WeighTile(n, st);
    for (int i = 0; i < n; ++i) tile[i] = values.Row(first + i);
    if (factored) ScaleSums<H>(dim, st);
    AddRows<BF16, H>({tile, n, st.s[0], st.alpha, values.padded(), factored ? u : st.o},
                     values.padded());
  }
  if (!factored) return;
  for (int h = 0; h < H; ++h) FromPairOrder<BF16>(u + h * values.padded(), values.padded());
  AddMatrixRows<BF16, H>(span.v.right, span.v.rank, dim, u, values.padded(), dim, st.o);
}

HWY_NOINLINE void AttendSpanPass(const LowRankSpan& span, int dim, QueryPass& pass) {
  KVS_CHECK(span.k.rank <= kMaxRank && span.v.rank <= kMaxRank);
  const PaddedRows keys(span.k.left, span.n, span.k.rank < 0 ? dim : span.k.rank);
  const PaddedRows values(span.v.left, span.n, span.v.rank < 0 ? dim : span.v.rank);
  for (int s = 0; s < pass.StateCount(); ++s) {
    WithHeads(pass.Heads(s),
              [&]<int H>() HWY_ATTR { AttendSpan<H>(span, keys, values, dim, pass.states[s]); });
  }
}

void AttendLowRankItem(const AttendLowRankWork& w) {
  KVS_CHECK(w.dim % 64 == 0 && w.dim <= kHeadDimMax);
  QueryPass pass;
  for (int first = 0; first < w.queries * w.group; first += QueryPass::kQueries) {
    OpenQueries<BF16>(w, first, w.dim, pass);
    for (int s = 0; s < w.span_count; ++s) AttendSpanPass(w.spans[s], w.dim, pass);
    CloseQueries<BF16>(w, pass);
  }
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AttendLowRankItem);

void AttendLowRankSimd(const AttendLowRankWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(AttendLowRankItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
