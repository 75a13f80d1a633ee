// SPDX-License-Identifier: Apache-2.0
// attend_raw for few queries (decode): bound by memory, so each row is read from it once and what
// comes next is prefetched. Included once per Highway target.
//
// Scores of R rows and H queries make one vector, lane h * R + r, from the dot products to exp.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_RAW_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_RAW_DECODE_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_RAW_DECODE_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_RAW_DECODE_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "kernels/ops/attend_raw/rotate_rows-inl.h"
#include "kernels/ops/attend_raw/row_cursor.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kDecodeQueriesMax = 8;  // queries * group
inline constexpr int kDecodeTileRows = 64;
inline constexpr int kHeads = 4;                             // queries at a time
inline constexpr int kRows = static_cast<int>(kN) / kHeads;  // rows at a time

// Channels that one pass over the values covers: H * 2 * kValuePairs accumulators in registers.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kValuePairs = 2;
#else
inline constexpr int kValuePairs = 1;
#endif

// Online softmax of up to kHeads queries. Vectors: lane h * kRows + r.
struct DecodeState {
  const float* q;  // [H][dim], scaled, in pair order, or rotated (half order)
  float* o;        // [H][dim], in pair order
  int32_t position[kHeads];
  alignas(64) float m[kN];  // equal over r
  alignas(64) float l[kN];  // partial sums over the rows of this r
  alignas(64) float alpha[kN];
  alignas(64) float s[kDecodeTileRows / kRows][kN];  // scores, then weights
};

HWY_INLINE void PrefetchRow(const std::byte* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// Scores of the tile, whose keys lie at `keys`, of K: as stored (K is T), or rotated (K is float).
// Rows that a query does not see get -inf. Prefetches the tile's values.
template <typename T, typename K, int H>
HWY_INLINE void ScoreTile(const RowTile& tile, const std::byte* const* keys, int dim, bool prefetch,
                          DecodeState& st) {
  const float none = -std::numeric_limits<float>::infinity();
  int visible[H];
  for (int h = 0; h < H; ++h) visible[h] = tile.Visible(st.position[h]);
  for (int i = 0, block = 0; i < tile.count; i += kRows, ++block) {
    const std::byte* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = keys[std::min(i + r, tile.count - 1)];
    if (prefetch) {
      for (int r = 0; r < kRows && i + r < tile.count; ++r) {
        PrefetchRow(tile.v[i + r], dim * static_cast<int64_t>(sizeof(T)));
      }
    }
    hn::Store(DotRows<K, kRows, H>(rows, st.q, dim, dim), DF(), st.s[block]);
    for (int h = 0; h < H; ++h) {
      if (i + kRows <= visible[h]) continue;
      for (int r = std::max(visible[h] - i, 0); r < kRows; ++r) st.s[block][h * kRows + r] = none;
    }
  }
}

// Gives each lane the largest of the lanes of its query.
HWY_INLINE VF MaxOverRows(VF v) {
  if constexpr (kRows > 1) v = hn::Max(v, hn::Shuffle2301(v));
  if constexpr (kRows > 2) v = hn::Max(v, hn::Shuffle1032(v));
  static_assert(kRows <= 4);
  return v;
}

// Scores to weights exp(s - m); updates m and l, and sets alpha = exp(m before - m).
HWY_INLINE void WeighTile(int count, DecodeState& st) {
  const DF d;
  const float none = -std::numeric_limits<float>::infinity();
  const int blocks = (count + kRows - 1) / kRows;
  VF top = hn::Load(d, st.m);
  // The second operand is what x86 returns for a NaN: m is the largest of the numbers.
  for (int b = 0; b < blocks; ++b) top = hn::Max(hn::Load(d, st.s[b]), top);
  const VF now = MaxOverRows(top);
  const VF shift = hn::IfThenElse(hn::Eq(now, hn::Set(d, none)), hn::Zero(d), now);
  const VF alpha = ExpNonPositive(hn::Sub(hn::Load(d, st.m), shift));
  VF sum = hn::Mul(hn::Load(d, st.l), alpha);
  for (int b = 0; b < blocks; ++b) {
    const VF p = ExpNonPositive(hn::Sub(hn::Load(d, st.s[b]), shift));
    hn::Store(p, d, st.s[b]);
    sum = hn::Add(sum, p);
  }
  hn::Store(now, d, st.m);
  hn::Store(sum, d, st.l);
  hn::Store(alpha, d, st.alpha);
}

// o = o * alpha + weights . values of the first `visible` rows, for queries [h0, h0 + H) and
// channels [c, c + 2N * kValuePairs). Prefetches the same channels of the next tile's keys.
template <typename T, int H>
HWY_INLINE void AddChannels(const RowTile& tile, const RowTile* next, int dim, int c, int visible,
                            int h0, DecodeState& st) {
  const DF d;
  constexpr int kVectors = 2 * kValuePairs;
  VF acc[H][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const VF alpha = hn::Set(d, st.alpha[(h0 + h) * kRows]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      acc[h][j] = hn::Mul(alpha, hn::LoadU(d, st.o + (h0 + h) * dim + c + j * kN));
    }
  }
  for (int i = 0; i < visible; ++i) {
    if (next != nullptr && i < next->count) {
      PrefetchRow(next->k[i] + c * sizeof(T), 2 * kN * kValuePairs * sizeof(T));
    }
    const T* row = reinterpret_cast<const T*>(tile.v[i]) + c;
    const float* p = &st.s[i / kRows][h0 * kRows + i % kRows];
    VF v[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kValuePairs; ++j) LoadPair(row + 2 * j * kN, v[2 * j], v[2 * j + 1]);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const VF weight = hn::Set(d, p[h * kRows]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[h][j] = hn::MulAdd(weight, v[j], acc[h][j]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      hn::StoreU(acc[h][j], d, st.o + (h0 + h) * dim + c + j * kN);
    }
  }
}

template <typename T, int H>
HWY_INLINE void AddValues(const RowTile& tile, const RowTile* next, int dim, int visible, int h0,
                          DecodeState& st) {
  for (int c = 0; c < dim; c += 2 * static_cast<int>(kN) * kValuePairs) {
    AddChannels<T, H>(tile, next, dim, c, visible, h0, st);
  }
}

template <typename T, typename K, int H>
HWY_NOINLINE void DecodeTile(const RowTile& tile, const std::byte* const* keys, const RowTile* next,
                             int dim, bool prefetch, DecodeState& st) {
  ScoreTile<T, K, H>(tile, keys, dim, prefetch, st);
  WeighTile(tile.count, st);
  if (tile.Visible(st.position[0]) == tile.count) {  // query 0 sees least
    AddValues<T, H>(tile, prefetch ? next : nullptr, dim, tile.count, 0, st);
    return;
  }
  // A weight of 0 does not hide a NaN in a later token's value: leave its row out.
  for (int h = 0; h < H; ++h) {
    AddValues<T, 1>(tile, nullptr, dim, tile.Visible(st.position[h]), h, st);
  }
}

template <typename T, typename K>
HWY_INLINE void DecodeHeads(int heads, const RowTile& tile, const std::byte* const* keys,
                            const RowTile* next, int dim, bool prefetch, DecodeState& st) {
  switch (heads) {
    case 1:
      return DecodeTile<T, K, 1>(tile, keys, next, dim, prefetch, st);
    case 2:
      return DecodeTile<T, K, 2>(tile, keys, next, dim, prefetch, st);
    case 3:
      return DecodeTile<T, K, 3>(tile, keys, next, dim, prefetch, st);
    default:
      return DecodeTile<T, K, 4>(tile, keys, next, dim, prefetch, st);
  }
}

template <typename T>
HWY_INLINE void OpenState(const AttendWork& w, int first, int heads, RowRotator* rotator, float* q,
                          DecodeState& st) {
  const int dim = w.k.dim;
  st.q = q;
  st.o = w.o + int64_t{first} * dim;
  std::fill(st.o, st.o + int64_t{heads} * dim, 0.0f);
  std::fill(st.m, st.m + kN, -std::numeric_limits<float>::infinity());
  std::fill(st.l, st.l + kN, 0.0f);
  for (int h = 0; h < heads; ++h) {
    const int token = (first + h) / w.group;
    const int head = (first + h) % w.group;
    if (rotator != nullptr) {
      rotator->Query(token, head, q + h * dim);
    } else {
      ToPairOrder<T>(w.q + token * w.q_token + int64_t{head} * dim, q + h * dim, dim);
    }
    for (int c = 0; c < dim; ++c) q[h * dim + c] *= w.scale;
    st.position[h] = w.position + token;
  }
}

template <typename T>
HWY_INLINE void CloseState(const AttendWork& w, int first, int heads, const DecodeState& st) {
  for (int h = 0; h < heads; ++h) {
    float l = 0;
    for (int r = 0; r < kRows; ++r) l += st.l[h * kRows + r];
    w.m[first + h] = st.m[h * kRows];
    w.l[first + h] = l;
    FromPairOrder<T>(st.o + h * w.k.dim, w.k.dim);
  }
}

// Where the keys of a tile lie: on their pages, ...
template <typename T>
class StoredKeys {
 public:
  using Row = T;
  explicit StoredKeys(const AttendWork&) {}
  RowRotator* rotator() { return nullptr; }
  HWY_INLINE const std::byte* const* Of(const RowTile& tile) { return tile.k; }
};

// ... or rotated, one tile at a time.
template <typename T>
class RotatedKeys {
 public:
  using Row = float;
  explicit RotatedKeys(const AttendWork& w) : rotator_(w) {
    for (int i = 0; i < kDecodeTileRows; ++i) {
      rows_[i] = reinterpret_cast<const std::byte*>(keys_ + i * w.k.dim);
    }
  }
  RowRotator* rotator() { return &rotator_; }
  HWY_INLINE const std::byte* const* Of(const RowTile& tile) {
    rotator_.Keys<T>(tile, keys_);
    return rows_;
  }

 private:
  RowRotator rotator_;
  const std::byte* rows_[kDecodeTileRows];
  alignas(64) float keys_[kDecodeTileRows * kHeadDimMax];
};

// Keys is StoredKeys<T> or RotatedKeys<T>. REQUIRES: queries * group <= kDecodeQueriesMax
template <typename T, typename Keys>
HWY_NOINLINE void AttendFew(const AttendWork& w) {
  constexpr int kStates = kDecodeQueriesMax / kHeads;
  const int dim = w.k.dim;
  const int rows = w.queries * w.group;
  alignas(64) float q[kDecodeQueriesMax * kHeadDimMax];
  DecodeState states[kStates];
  Keys keys(w);
  const auto heads_of = [rows](int s) HWY_ATTR { return std::min(rows - s * kHeads, kHeads); };
  for (int s = 0; s * kHeads < rows; ++s) {
    OpenState<T>(w, s * kHeads, heads_of(s), keys.rotator(), q + s * kHeads * dim, states[s]);
  }
  RowTile tiles[2];
  RowCursor cursor(w);
  cursor.Next(kDecodeTileRows, &tiles[0]);
  for (int t = 0; tiles[t].count > 0; t = 1 - t) {
    cursor.Next(kDecodeTileRows, &tiles[1 - t]);
    const std::byte* const* rows_of_tile = keys.Of(tiles[t]);
    for (int s = 0; s * kHeads < rows; ++s) {
      DecodeHeads<T, typename Keys::Row>(heads_of(s), tiles[t], rows_of_tile, &tiles[1 - t], dim,
                                         s == 0, states[s]);
    }
  }
  for (int s = 0; s * kHeads < rows; ++s) CloseState<T>(w, s * kHeads, heads_of(s), states[s]);
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_RAW_DECODE_INL_H_
