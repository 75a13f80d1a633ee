// SPDX-License-Identifier: Apache-2.0
// Attention of one warp over what lies between and behind spans, coarse rows and expanded spans,
// for the query heads of one KV head. In fragments of tensor cores throughout (tile_softmax.cuh).
//
// An expanded span of n tokens, of rank r in keys and values: T = B q by 16 rows of B, scores S = A
// T by 16 tokens, weights P, U += A^T P, and once o += B^T U. What leaves a product is the next
// one's right-hand side after a transpose in registers. Ranks beyond kRankTiles * 16 go in blocks,
// whose T and U are made anew for every 16 tokens. A has rows of any length: its elements are read
// by twos, B as other rows are.
#pragma once

#include "kernels/ops/merge/tile_softmax.cuh"
#include "kernels/plans/sekv/ops/attend_spans/row_tiles.cuh"

namespace kvstrata::cuda {

inline constexpr int kRankTiles = 2;  // tiles of 16 ranks, in registers
inline constexpr int kRankBlock = kRankTiles * kSpanTileRows;
// Maxima of heads that have seen no row: below every score, and finite, so that a tile of which a
// head sees nothing leaves no NaN.
inline constexpr float kNoMaximum = -1e30f;

// A factored side of a span: A bf16 [n][rank], B bf16 [rank][head_dim]; rank < 0: rows at `left`.
struct FactorPair {
  uint64_t left, right;
  int32_t rank;

  static __device__ __forceinline__ FactorPair At(uint64_t left, int32_t n, int32_t rank) {
    return {left, left + static_cast<uint64_t>(n * max(rank, 0) + 31) / 32 * 64, rank};
  }
  __device__ __forceinline__ int32_t blocks() const {
    return rank < 0 ? 0 : (rank + kRankBlock - 1) / kRankBlock;
  }
  // Two neighbouring elements of a row of A as one register; 0 where a rank is none. REQUIRES:
  // token < n, of_rank even.
  __device__ __forceinline__ uint32_t Pair(int32_t token, int32_t of_rank) const {
    if (of_rank >= rank) return 0u;
    const uint64_t at = left + 2 * (static_cast<uint64_t>(token) * rank + of_rank);
    if (rank % 2 == 0) return *reinterpret_cast<const uint32_t*>(at);
    const auto* const x = reinterpret_cast<const uint16_t*>(at);
    return of_rank + 1 < rank ? x[0] | uint32_t{x[1]} << 16 : x[0];
  }
};

template <typename T, int kDim>
class WarpSpans {
  using Factor = __nv_bfloat16;

 public:
  // Queries in T and in bf16; the same where T is bf16. scale: of logits, with log2(e).
  __device__ __forceinline__ WarpSpans(const QueryFragments<kDim>& native,
                                       const QueryFragments<kDim>& factor, int group, float scale)
      : native_(native), factor_(factor), group_(group), wide_(group > 4), scale_(scale) {
    softmax_.m[0] = softmax_.m[1] = kNoMaximum;
  }

  // Rows of the model's dtype.
  __device__ __forceinline__ void AddRows(const RowTile& keys, const RowTile& values) {
    AddTile<T>(native_, keys, values, ~0u);
  }

  // Coarse rows whose logits lie at logits[head * stride + row].
  __device__ __forceinline__ void AddCoarse(const float* logits, int32_t stride,
                                            const RowTile& values) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    ValueTile<kDim> v;
    v.Load(values);
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = 2 * t + (i & 1), row = g + 8 * (i >> 1);
      s[i] = head < group_ && row < values.last ? logits[head * stride + row] : -INFINITY;
    }
    uint32_t p0, p1;
    softmax_.template Weigh<Factor>(values.Present(), kLog2E, s, p0, p1);
    v.template AddTo<Factor>(softmax_.o, p0, p1);
  }

  // A piece of a span of n tokens that the heads whose bit is set read: the 16 tokens from `first`
  // on, and every `step` tokens behind. REQUIRES: first < n.
  __device__ __forceinline__ void AddSpan(const FactorPair& k, const FactorPair& v, int32_t n,
                                          uint32_t heads, int32_t first, int32_t step) {
    if (k.rank >= 0 || v.rank >= 0) return AddFactored(k, v, n, heads, first, step);
#pragma unroll 1
    for (; first < n; first += step) {
      AddTile<Factor>(factor_, RowsAt(k.left, first, n), RowsAt(v.left, first, n), heads);
    }
  }
  __device__ __forceinline__ TileSoftmax<kDim / 16>& softmax() { return softmax_; }

 private:
  // Right-hand fragments of T of one block.
  struct RankQueries {
    uint32_t high[kRankTiles][2], low[kRankTiles][2];
  };

  // A of 16 tokens and one block.
  struct LeftFragments {
    uint32_t x[kRankTiles][4];
  };

  static __device__ __forceinline__ RowTile RowsAt(uint64_t rows, int32_t first, int32_t n) {
    return {rows + int64_t{first} * kDim * 2, kDim * 2, 0, min(n - first, kSpanTileRows)};
  }
  template <typename E>
  __device__ __forceinline__ void AddTile(const QueryFragments<kDim>& q, const RowTile& keys,
                                          const RowTile& values, uint32_t heads) {
    KeyTile<kDim> k;
    ValueTile<kDim> v;
    k.Load(keys);
    v.Load(values);
    float s[4];
    k.template Score<E>(q, wide_, s);
    uint32_t p0, p1;
    Mask(heads, s);
    softmax_.template Weigh<E>(keys.Present(), scale_, s, p0, p1);
    v.template AddTo<E>(softmax_.o, p0, p1);
  }
  __device__ __forceinline__ void Mask(uint32_t heads, float (&s)[4]) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = (2 * t + (i & 1)) & (wide_ ? 7 : 3);
      if ((heads >> head & 1) == 0) s[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ void AddFactored(const FactorPair& k, const FactorPair& v, int32_t n,
                                              uint32_t heads, int32_t begin, int32_t step) {
    RankQueries queries = {};
    float u[kRankTiles][4] = {};
#pragma unroll 1
    for (int32_t first = begin; first < n; first += step) {
      const int32_t rows = min(n - first, kSpanTileRows);
      // Both sides' elements are asked for at once.
      LeftFragments left_k, left_v;
      if (k.blocks() == 1) LoadLeft(k, first, rows, 0, left_k);
      if (v.blocks() == 1) LoadLeft(v, first, rows, 0, left_v);
      float s[4] = {0, 0, 0, 0};
      if (k.rank < 0) {
        KeyTile<kDim> keys;
        keys.Load(RowsAt(k.left, first, n));
        keys.template Score<Factor>(factor_, wide_, s);
      }
#pragma unroll 1
      for (int32_t block = 0; block < k.blocks(); ++block) {
        if (first == begin || k.blocks() > 1) Project(k, block * kRankBlock, queries);
        if (k.blocks() > 1) LoadLeft(k, first, rows, block * kRankBlock, left_k);
        AddScores(left_k, queries, s);
      }
      if (k.rank >= 0 && !wide_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] += __shfl_xor_sync(kAllLanes, s[i], 2);
      }
      Mask(heads, s);
      uint32_t p0, p1;
      const float m0 = softmax_.m[0], m1 = softmax_.m[1];
      softmax_.template Weigh<Factor>((1u << rows) - 1, scale_, s, p0, p1);
      if (v.rank < 0) {
        ValueTile<kDim> values;
        values.Load(RowsAt(v.left, first, n));
        values.template AddTo<Factor>(softmax_.o, p0, p1);
        continue;
      }
      const float weight[2] = {exp2f(m0 - softmax_.m[0]), exp2f(m1 - softmax_.m[1])};
#pragma unroll
      for (int j = 0; j < kRankTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) u[j][i] *= weight[i & 1];
      }
      const bool last = first + step >= n;
#pragma unroll 1
      for (int32_t block = 0; block < v.blocks(); ++block) {
        if (v.blocks() > 1) LoadLeft(v, first, rows, block * kRankBlock, left_v);
        AddWeights(left_v, p0, p1, u);
        if (last || v.blocks() > 1) AddBack(v, block * kRankBlock, u);
      }
    }
  }

  // T of the ranks of a block.
  __device__ __forceinline__ void Project(const FactorPair& k, int32_t rank, RankQueries& q) {
    const bool rest = !wide_ && threadIdx.x % 4 >= 2;  // columns 4..7 of up to 4 heads
#pragma unroll
    for (int j = 0; j < kRankTiles; ++j) {
      const int32_t first = rank + j * kSpanTileRows;
      if (first >= k.rank) break;
      KeyTile<kDim> rows;
      rows.Load(RowsAt(k.right, first, k.rank));
      float s[4];
      rows.template Score<Factor>(factor_, wide_, s);
      q.high[j][0] = Transpose8x8(PackPart(s[0], s[1], rest));
      q.high[j][1] = Transpose8x8(PackPart(s[2], s[3], rest));
      if (!wide_) continue;
      q.low[j][0] = Transpose8x8(PackPart(s[0], s[1], true));
      q.low[j][1] = Transpose8x8(PackPart(s[2], s[3], true));
    }
  }
  // A of 16 tokens and a block's ranks.
  __device__ __forceinline__ void LoadLeft(const FactorPair& x, int32_t first, int32_t rows,
                                           int32_t rank, LeftFragments& a) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int32_t low = first + min(g, rows - 1), high = first + min(g + 8, rows - 1);
#pragma unroll
    for (int j = 0; j < kRankTiles; ++j) {
      const int32_t c = rank + j * kSpanTileRows + 2 * t;
      a.x[j][0] = x.Pair(low, c);
      a.x[j][1] = x.Pair(high, c);
      a.x[j][2] = x.Pair(low, c + 8);
      a.x[j][3] = x.Pair(high, c + 8);
    }
  }
  // s += A T of 16 tokens; of up to 4 heads, columns 4..7 have what T's rounding lost.
  __device__ __forceinline__ void AddScores(const LeftFragments& a, const RankQueries& q,
                                            float (&s)[4]) const {
#pragma unroll
    for (int j = 0; j < kRankTiles; ++j) {
      const auto& x = a.x[j];
      MmaM16N8K16<Factor>(s, x[0], x[1], x[2], x[3], q.high[j][0], q.high[j][1]);
      if (wide_) MmaM16N8K16<Factor>(s, x[0], x[1], x[2], x[3], q.low[j][0], q.low[j][1]);
    }
  }
  // u += A^T P of 16 tokens.
  __device__ __forceinline__ void AddWeights(const LeftFragments& a, uint32_t p0, uint32_t p1,
                                             float (&u)[kRankTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kRankTiles; ++j) {
      const auto& x = a.x[j];
      MmaM16N8K16<Factor>(u[j], Transpose8x8(x[0]), Transpose8x8(x[2]), Transpose8x8(x[1]),
                          Transpose8x8(x[3]), p0, p1);
    }
  }
  // o += B^T U of the ranks of a block, and U is 0 again.
  __device__ __forceinline__ void AddBack(const FactorPair& v, int32_t rank,
                                          float (&u)[kRankTiles][4]) {
    using E = Element<Factor>;
#pragma unroll
    for (int j = 0; j < kRankTiles; ++j) {
      const int32_t first = rank + j * kSpanTileRows;
      if (first >= v.rank) break;
      ValueTile<kDim> rows;
      rows.Load(RowsAt(v.right, first, v.rank));
      const uint32_t p0 = Transpose8x8(E::Pack(u[j][0], u[j][1]));
      const uint32_t p1 = Transpose8x8(E::Pack(u[j][2], u[j][3]));
      rows.template AddTo<Factor>(softmax_.o, p0, p1);
      for (float& x : u[j]) x = 0;
    }
  }

  const QueryFragments<kDim>&native_, &factor_;
  const int group_;
  const bool wide_;
  const float scale_;
  TileSoftmax<kDim / 16> softmax_;
};

}  // namespace kvstrata::cuda
