// SPDX-License-Identifier: Apache-2.0
// attend_raw for many queries (prefill): bound by arithmetic, so rows are widened to fp32 once a
// tile and two register-blocked matrix products run over them. Included once per Highway target.
//
//   S^T [rows][queries] = K Q^T     queries along the lanes: the softmax needs no sum across lanes
//   O [queries][dim]   += P V       channels along the lanes
//
// Queries are processed in panels of kPanel, whose scores stay in the L1 cache from one product to
// the other. Both products are MultiplyBlock with the left operand broadcast.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_RAW_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_RAW_PREFILL_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_RAW_PREFILL_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_RAW_PREFILL_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "kernels/ops/attend_raw/rotate_rows-inl.h"
#include "kernels/ops/attend_raw/row_cursor.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

// A block of kBlockRows x kBlockVectors accumulators, the vectors of a step and a broadcast fill
// the register file.
inline constexpr int kBlockRows = 6;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kBlockVectors = 4;
#else
inline constexpr int kBlockVectors = 2;
#endif
inline constexpr int kBlockWidth = kBlockVectors * static_cast<int>(kN);
inline constexpr int kPanel = kBlockWidth;  // queries
inline constexpr int kPrefillTileRows = 48;
static_assert(kPrefillTileRows % kBlockRows == 0 && kPrefillTileRows <= kTileRowsMax);

// c [MR][NV * N] = (kAdd ? c * scale_c[row] : 0) + sum over n steps of a[row, step] b[step]
template <int MR, int NV, bool kAdd>
HWY_INLINE void MultiplyBlock(const float* a, int a_row, int a_step, const float* b, int b_step,
                              int n, float* c, int c_row, const float* scale_c) {
  const DF d;
  VF acc[MR][NV];
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      acc[i][j] = kAdd ? hn::Mul(hn::Set(d, scale_c[i]), hn::LoadU(d, c + i * c_row + j * kN))
                       : hn::Zero(d);
    }
  }
  for (int k = 0; k < n; ++k) {
    VF bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = hn::LoadU(d, b + j * kN);
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      const VF av = hn::Set(d, a[i * a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(av, bv[j], acc[i][j]);
    }
    a += a_step;
    b += b_step;
  }
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) hn::StoreU(acc[i][j], d, c + i * c_row + j * kN);
  }
}

// What one work item computes on. All fp32, 64-byte aligned, in one allocation.
struct PrefillSpace {
  int dim, rows, padded;  // rows: queries * group; padded to a whole number of panels
  std::unique_ptr<float[], void (*)(float*)> memory;
  float* q;         // [padded / kPanel][dim][kPanel], scaled, in the order of k
  float* k;         // [kPrefillTileRows][dim], in pair order, or rotated (half order)
  float* v;         // [kPrefillTileRows][dim], in pair order
  float* s;         // [kPrefillTileRows][kPanel]
  float* m;         // [padded]
  float* l;         // [padded]
  float* alpha;     // [kPanel]
  float* position;  // [padded], as int32 bits

  PrefillSpace(int head_dim, int query_rows)
      : dim(head_dim),
        rows(query_rows),
        padded((query_rows + kPanel - 1) / kPanel * kPanel),
        memory(nullptr, Free) {
    const int64_t tile = int64_t{kPrefillTileRows} * dim;
    const int64_t floats = int64_t{padded} * dim + 2 * tile + int64_t{kPrefillTileRows} * kPanel +
                           3 * int64_t{padded} + kPanel;
    memory.reset(static_cast<float*>(
        ::operator new (static_cast<size_t>(floats) * sizeof(float), std::align_val_t{64})));
    q = memory.get();
    k = q + int64_t{padded} * dim;
    v = k + tile;
    s = v + tile;
    m = s + int64_t{kPrefillTileRows} * kPanel;
    l = m + padded;
    position = l + padded;
    alpha = position + padded;
  }
  static void Free(float* p) { ::operator delete (p, std::align_val_t{64}); }
};

template <typename T>
HWY_INLINE void PackQueries(const AttendWork& w, RowRotator* rotator, PrefillSpace& sp) {
  float row[kHeadDimMax];
  std::fill(sp.q, sp.q + int64_t{sp.padded} * sp.dim, 0.0f);
  std::fill(sp.m, sp.m + sp.padded, -std::numeric_limits<float>::infinity());
  std::fill(sp.l, sp.l + sp.padded, 0.0f);
  for (int j = 0; j < sp.padded; ++j) {
    const int32_t at = w.position + std::min(j, sp.rows - 1) / w.group;
    std::memcpy(sp.position + j, &at, sizeof at);
  }
  for (int j = 0; j < sp.rows; ++j) {
    const int token = j / w.group, head = j % w.group;
    if (rotator != nullptr) {
      rotator->Query(token, head, row);
    } else {
      ToPairOrder<T>(w.q + token * w.q_token + int64_t{head} * sp.dim, row, sp.dim);
    }
    float* to = sp.q + int64_t{j / kPanel} * sp.dim * kPanel + j % kPanel;
    for (int c = 0; c < sp.dim; ++c) to[c * kPanel] = row[c] * w.scale;
  }
}

// Missing rows of the last block become 0.
HWY_INLINE void PadBlock(int count, int dim, float* out) {
  const int end = (count + kBlockRows - 1) / kBlockRows * kBlockRows;
  std::fill(out + count * dim, out + end * dim, 0.0f);
}

// Rows to fp32, in pair order.
template <typename T>
HWY_INLINE void WidenRows(const std::byte* const* rows, int count, int dim, float* out) {
  const DF d;
  for (int i = 0; i < count; ++i) {
    const T* row = reinterpret_cast<const T*>(rows[i]);
    for (int c = 0; c < dim; c += 2 * static_cast<int>(kN)) {
      VF a, b;
      LoadPair(row + c, a, b);
      hn::StoreU(a, d, out + i * dim + c);
      hn::StoreU(b, d, out + i * dim + c + kN);
    }
  }
  PadBlock(count, dim, out);
}

// s [rows][kPanel] = K Q^T of one panel; `width` vectors of queries are in use.
HWY_INLINE void ScorePanel(const PrefillSpace& sp, const float* q, int rows, int width) {
  for (int i = 0; i < rows; i += kBlockRows) {
    const float* a = sp.k + i * sp.dim;
    float* c = sp.s + i * kPanel;
    switch (width) {
      case 1:
        MultiplyBlock<kBlockRows, 1, false>(a, sp.dim, 1, q, kPanel, sp.dim, c, kPanel, nullptr);
        break;
      case 2:
        MultiplyBlock<kBlockRows, 2, false>(a, sp.dim, 1, q, kPanel, sp.dim, c, kPanel, nullptr);
        break;
      default:
        MultiplyBlock<kBlockRows, kBlockVectors, false>(a, sp.dim, 1, q, kPanel, sp.dim, c, kPanel,
                                                        nullptr);
    }
  }
}

// Scores of N queries (columns [j, j + N) of the panel) to weights; updates m, l, alpha.
HWY_INLINE void WeighColumns(const RowTile& tile, bool causal, float* s, float* m, float* l,
                             const float* position, float* alpha) {
  const DF d;
  const DI di;
  const VF none = hn::Set(d, -std::numeric_limits<float>::infinity());
  const VF before = hn::Load(d, m);
  VF now = before;
  if (causal) {
    const auto at = hn::BitCast(di, hn::Load(d, position));
    for (int i = 0; i < tile.count; ++i) {
      const auto unseen = hn::RebindMask(d, hn::Gt(hn::Set(di, tile.position[i]), at));
      const VF x = hn::IfThenElse(unseen, none, hn::Load(d, s + i * kPanel));
      hn::Store(x, d, s + i * kPanel);
      now = hn::Max(now, x);
    }
  } else {
    for (int i = 0; i < tile.count; ++i) now = hn::Max(now, hn::Load(d, s + i * kPanel));
  }
  const VF shift = hn::IfThenElse(hn::Eq(now, none), hn::Zero(d), now);
  const VF a = ExpNonPositive(hn::Sub(before, shift));
  VF sum = hn::Mul(hn::Load(d, l), a);
  for (int i = 0; i < tile.count; ++i) {
    const VF p = ExpNonPositive(hn::Sub(hn::Load(d, s + i * kPanel), shift));
    hn::Store(p, d, s + i * kPanel);
    sum = hn::Add(sum, p);
  }
  hn::Store(now, d, m);
  hn::Store(sum, d, l);
  hn::Store(a, d, alpha);
}

// o [MR][dim] = o * alpha + weights . values of the first n rows, for MR queries.
template <int MR>
HWY_INLINE void AddValuesOf(const PrefillSpace& sp, int column, int n, float* o) {
  for (int c = 0; c < sp.dim; c += kBlockWidth) {
    MultiplyBlock<MR, kBlockVectors, true>(sp.s + column, 1, kPanel, sp.v + c, sp.dim, n, o + c,
                                           sp.dim, sp.alpha + column);
  }
}

HWY_INLINE void AddValuesOfBlock(int queries, const PrefillSpace& sp, int column, int n, float* o) {
  switch (queries) {
    case 1:
      return AddValuesOf<1>(sp, column, n, o);
    case 2:
      return AddValuesOf<2>(sp, column, n, o);
    case 3:
      return AddValuesOf<3>(sp, column, n, o);
    case 4:
      return AddValuesOf<4>(sp, column, n, o);
    case 5:
      return AddValuesOf<5>(sp, column, n, o);
    default:
      return AddValuesOf<6>(sp, column, n, o);
  }
}

// The values of one panel's queries. Queries of a block see the same rows of the tile: a weight of
// 0 would not hide a NaN in a later token's value.
HWY_INLINE void AddPanelValues(const AttendWork& w, const RowTile& tile, const PrefillSpace& sp,
                               int first, int end) {
  for (int j = first; j < end;) {
    int stop = std::min(j + kBlockRows, end);
    const int n = tile.Visible(w.position + j / w.group);
    if (n != tile.Visible(w.position + (stop - 1) / w.group)) {
      stop = std::min(stop, (j / w.group + 1) * w.group);
    }
    if (n > 0) AddValuesOfBlock(stop - j, sp, j - first, n, w.o + int64_t{j} * sp.dim);
    j = stop;
  }
}

HWY_INLINE void AttendPanel(const AttendWork& w, const RowTile& tile, PrefillSpace& sp, int first) {
  const int end = std::min(first + kPanel, sp.rows);
  if (tile.Visible(w.position + (end - 1) / w.group) == 0) return;
  const bool causal = tile.Visible(w.position + first / w.group) < tile.count;
  const int width = (end - first + static_cast<int>(kN) - 1) / static_cast<int>(kN);
  ScorePanel(sp, sp.q + int64_t{first} * sp.dim, tile.count, width);
  for (int j = 0; j < width * static_cast<int>(kN); j += static_cast<int>(kN)) {
    WeighColumns(tile, causal, sp.s + j, sp.m + first + j, sp.l + first + j,
                 sp.position + first + j, sp.alpha + j);
  }
  AddPanelValues(w, tile, sp, first, end);
}

// rotator is null where keys are used as they are stored.
template <typename T>
HWY_NOINLINE void AttendMany(const AttendWork& w, RowRotator* rotator) {
  const int dim = w.k.dim;
  PrefillSpace sp(dim, w.queries * w.group);
  PackQueries<T>(w, rotator, sp);
  std::fill(w.o, w.o + int64_t{sp.rows} * dim, 0.0f);
  RowTile tile;
  RowCursor cursor(w);
  for (cursor.Next(kPrefillTileRows, &tile); tile.count > 0; cursor.Next(kPrefillTileRows, &tile)) {
    if (rotator != nullptr) {
      rotator->Keys<T>(tile, sp.k);
      PadBlock(tile.count, dim, sp.k);
    } else {
      WidenRows<T>(tile.k, tile.count, dim, sp.k);
    }
    WidenRows<T>(tile.v, tile.count, dim, sp.v);
    for (int first = 0; first < sp.rows; first += kPanel) AttendPanel(w, tile, sp, first);
  }
  std::copy(sp.m, sp.m + sp.rows, w.m);
  std::copy(sp.l, sp.l + sp.rows, w.l);
  for (int j = 0; j < sp.rows; ++j) FromPairOrder<T>(w.o + int64_t{j} * dim, dim);
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_RAW_PREFILL_INL_H_
