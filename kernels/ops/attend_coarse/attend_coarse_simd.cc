// SPDX-License-Identifier: Apache-2.0
// Predicted: bound by memory as attend_raw is, 2 rows a unit.
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/attend_coarse/attend_coarse_simd.cc"
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "kernels/ops/attend_coarse/query_pass-inl.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

// Lane h * kRows + r: ln n of the tile's unit i + r; -inf beyond the last unit.
HWY_INLINE VF LogCounts(const AttendCoarseWork& w, const RowTile& tile, int i) {
  alignas(64) float lanes[kN];
  for (int r = 0; r < kRows; ++r) {
    float log = -std::numeric_limits<float>::infinity();
    if (i + r < tile.count) {
      log = w.log_count != nullptr ? w.log_count[tile.position[i + r]] : w.log_count_all;
    }
    for (int h = 0; h < kHeads; ++h) lanes[h * kRows + r] = log;
  }
  return hn::Load(DF(), lanes);
}

// Logits of the tile. Prefetches the tile's values.
template <typename T, int H>
HWY_NOINLINE void CoarseLogits(const AttendCoarseWork& w, const RowTile& tile, bool prefetch,
                               DecodeState& st) {
  const int dim = w.k.dim;
  for (int i = 0; i < tile.count; i += kRows) {
    const std::byte* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      rows[r] = tile.k[std::min(i + r, tile.count - 1)];
      if (prefetch && i + r < tile.count) {
        PrefetchRow(tile.v[i + r], dim * static_cast<int64_t>(sizeof(T)));
      }
    }
    const VF logits = DotRows<T, kRows, H>(rows, st.q, dim, dim);
    hn::Store(hn::Add(logits, LogCounts(w, tile, i)), DF(), st.s[i / kRows]);
  }
}

template <typename T>
HWY_INLINE void CoarseTile(const AttendCoarseWork& w, const RowTile& tile, const RowTile& next,
                           QueryPass& pass) {
  const int dim = w.k.dim;
  for (int s = 0; s < pass.StateCount(); ++s) {
    DecodeState& st = pass.states[s];
    WithHeads(pass.Heads(s), [&]<int H>() HWY_ATTR {
      CoarseLogits<T, H>(w, tile, s == 0, st);
      WeighTile(tile.count, st);
      AddValues<T, H>(tile, s == 0 ? &next : nullptr, dim, tile.count, 0, st);
    });
  }
}

// RowCursor walks the rows of an attend_raw item; this one sees every unit.
HWY_INLINE AttendWork RowsOf(const AttendCoarseWork& w) {
  AttendWork rows;
  rows.k = w.k;
  rows.v = w.v;
  rows.runs = w.runs;
  rows.run_count = w.run_count;
  rows.position = std::numeric_limits<int32_t>::max() - 1;
  return rows;
}

template <typename T>
HWY_NOINLINE void CoarseQueries(const AttendCoarseWork& w, int first, QueryPass& pass) {
  OpenQueries<T>(w, first, w.k.dim, pass);
  const AttendWork rows = RowsOf(w);
  RowCursor cursor(rows);
  RowTile tiles[2];
  cursor.Next(kDecodeTileRows, &tiles[0]);
  for (int t = 0; tiles[t].count > 0; t = 1 - t) {
    cursor.Next(kDecodeTileRows, &tiles[1 - t]);
    CoarseTile<T>(w, tiles[t], tiles[1 - t], pass);
  }
  CloseQueries<T>(w, pass);
}

template <typename T>
HWY_INLINE void CoarseTyped(const AttendCoarseWork& w) {
  QueryPass pass;
  for (int first = 0; first < w.queries * w.group; first += QueryPass::kQueries) {
    CoarseQueries<T>(w, first, pass);
  }
}

void AttendCoarseItem(const AttendCoarseWork& w) {
  WithElement(w.k.dtype, [&]<typename T>() { CoarseTyped<T>(w); });
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AttendCoarseItem);

void AttendCoarseSimd(const AttendCoarseWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    const AttendCoarseWork& w = work[i];
    KVS_CHECK(w.k.dtype == w.v.dtype && w.k.dim == w.v.dim);
    KVS_CHECK(w.k.dim % 64 == 0 && w.k.dim <= 256);
    KVS_SIMD_CALL(AttendCoarseItem)(w);
  });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
