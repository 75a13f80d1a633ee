// SPDX-License-Identifier: Apache-2.0
// Weighted sums of rows for a few queries; shared by the attention ops on compressed rows. Included
// once per Highway target.
//
// Weights of R rows and H queries lie as DecodeState's scores do: row i of query h is lane
// h * kRows + i % kRows of vector i / kRows.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_COARSE_WEIGHTED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_COARSE_WEIGHTED_ROWS_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_COARSE_WEIGHTED_ROWS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_COARSE_WEIGHTED_ROWS_INL_H_
#endif

#include <algorithm>

#include "kernels/ops/attend_raw/decode-inl.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

// Pairs of vectors that one pass covers: 4 * 2 * kWidePairs accumulators in registers.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kWidePairs = 3;
#else
inline constexpr int kWidePairs = 1;
#endif

HWY_INLINE constexpr int WeightAt(int h, int i) {
  return i / kRows * static_cast<int>(kN) + h * kRows + i % kRows;
}

struct WeightedRows {
  const std::byte* const* rows;
  int count;
  const float* weights;
  const float* alpha;  // lane h * kRows: what o is multiplied by first
  int64_t o_stride;    // floats from a query's sum to the next
  float* o;            // in T's pair order
};

// Reads a row of T in pairs of vectors, ascending.
template <typename T>
struct StoredRow {
  const T* at;

  HWY_INLINE void NextPair(VF& a, VF& b) {
    LoadPair(at, a, b);
    at += 2 * kN;
  }
};

// Rows of T by their addresses.
template <typename T>
struct StoredRows {
  const std::byte* const* rows;

  // Row i from channel c on.
  HWY_INLINE StoredRow<T> At(int i, int c) const {
    return {reinterpret_cast<const T*>(rows[i]) + c};
  }
};

// acc += weights of a row (query h at weights[h * kRows]) times its next P pairs.
template <int H, int P, typename Row>
HWY_INLINE void AddRow(Row row, const float* weights, VF (&acc)[H][2 * P]) {
  VF weight[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) weight[h] = hn::Set(DF(), weights[h * kRows]);
#pragma GCC unroll 4
  for (int j = 0; j < 2 * P; j += 2) {
    VF a, b;
    row.NextPair(a, b);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      acc[h][j] = hn::MulAdd(weight[h], a, acc[h][j]);
      acc[h][j + 1] = hn::MulAdd(weight[h], b, acc[h][j + 1]);
    }
  }
}

template <int H, int P, typename Rows>
HWY_INLINE void AddPairs(const Rows& rows, const WeightedRows& w, int c) {
  const DF d;
  constexpr int kVectors = 2 * P;
  VF acc[H][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const VF alpha = hn::Set(d, w.alpha[h * kRows]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      acc[h][j] = hn::Mul(alpha, hn::LoadU(d, w.o + h * w.o_stride + c + j * kN));
    }
  }
  const float* p = w.weights;
  int i = 0;
  for (; i + kRows <= w.count; i += kRows, p += kN) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) AddRow<H, P>(rows.At(i + r, c), p + r, acc);
  }
  for (; i < w.count; ++i, ++p) AddRow<H, P>(rows.At(i, c), p, acc);
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      hn::StoreU(acc[h][j], d, w.o + h * w.o_stride + c + j * kN);
    }
  }
}

// o = o * alpha + weights . rows, of H queries and the first `channels` channels, a multiple of 2N.
// `rows` stand for w.rows: StoredRows, or what has an At like its.
template <int H, typename Rows>
HWY_NOINLINE void AddRowsOf(const Rows& rows, const WeightedRows& w, int channels) {
  constexpr int pair = 2 * static_cast<int>(kN);
  int c = 0;
  for (; c + kWidePairs * pair <= channels; c += kWidePairs * pair) {
    AddPairs<H, kWidePairs>(rows, w, c);
  }
  if constexpr (kWidePairs > 2) {
    for (; c + 2 * pair <= channels; c += 2 * pair) AddPairs<H, 2>(rows, w, c);
  }
  for (; c < channels; c += pair) AddPairs<H, 1>(rows, w, c);
}

template <typename T, int H>
HWY_INLINE void AddRows(const WeightedRows& w, int channels) {
  AddRowsOf<H>(StoredRows<T>{w.rows}, w, channels);
}

// out [H][dim] += weights . rows of a matrix [count][dim]; weight of row i and query h is
// x[h * x_stride + i].
template <typename T, int H>
HWY_INLINE void AddMatrixRows(const T* matrix, int count, int dim, const float* x, int64_t x_stride,
                              int64_t out_stride, float* out) {
  constexpr int kTile = 64;
  alignas(64) float weights[kTile / kRows * kN];
  alignas(64) float one[kN];
  std::fill(one, one + kN, 1.0f);
  const std::byte* rows[kTile];
  for (int first = 0; first < count; first += kTile) {
    const int n = std::min(kTile, count - first);
    for (int i = 0; i < n; ++i) {
      rows[i] = reinterpret_cast<const std::byte*>(matrix + int64_t{first + i} * dim);
      for (int h = 0; h < H; ++h) weights[WeightAt(h, i)] = x[h * x_stride + first + i];
    }
    AddRows<T, H>({rows, n, weights, one, out_stride, out}, dim);
  }
}

// Calls fn.template operator()<H>() for the H in [1, kHeads] that `heads` is.
template <typename F>
HWY_INLINE void WithHeads(int heads, const F& fn) {
  switch (heads) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 3:
      return fn.template operator()<3>();
    default:
      return fn.template operator()<4>();
  }
}

// Sets `st` to no row seen; its sums st.o are [heads][dim], which it clears.
HWY_INLINE void ClearState(int heads, int dim, DecodeState& st) {
  std::fill(st.o, st.o + int64_t{heads} * dim, 0.0f);
  std::fill(st.m, st.m + kN, -std::numeric_limits<float>::infinity());
  std::fill(st.l, st.l + kN, 0.0f);
}

HWY_INLINE float SumOfWeights(const DecodeState& st, int h) {
  float l = 0;
  for (int r = 0; r < kRows; ++r) l += st.l[h * kRows + r];
  return l;
}

// Scores of the rows from the first `count` of kRows on are -inf.
template <int H>
HWY_INLINE void HideRows(int count, float* scores) {
  for (int r = count; r < kRows; ++r) {
    for (int h = 0; h < H; ++h) scores[h * kRows + r] = -std::numeric_limits<float>::infinity();
  }
}

// st.s of `count` rows = rows . queries q [H][q_stride], over dim channels, a multiple of 2N; the
// lanes beyond the last row get -inf. `q` in T's pair order.
template <typename T, int H>
HWY_NOINLINE void ScoreRows(const std::byte* const* rows, int count, const float* q, int q_stride,
                            int dim, DecodeState& st) {
  for (int i = 0; i < count; i += kRows) {
    const std::byte* four[kRows];
    for (int r = 0; r < kRows; ++r) four[r] = rows[std::min(i + r, count - 1)];
    float* s = st.s[i / kRows];
    hn::Store(DotRows<T, kRows, H>(four, q, q_stride, dim), DF(), s);
    HideRows<H>(count - i, s);
  }
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_COARSE_WEIGHTED_ROWS_INL_H_
