// SPDX-License-Identifier: Apache-2.0
// Tiles of 16 rows from memory to the tensor cores' left-hand fragments, in registers: rows as they
// are, for products with queries (KeyTile), and transposed, for sums of weighted rows (ValueTile).
// As in attend_raw/warp_attention.cuh, for rows that follow each other `stride` bytes apart. Where
// a row is outside [first, last), the nearest one inside is read.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/cuda/warps/row_scores.cuh"

namespace kvstrata::cuda {

struct RowTile {
  uint64_t at;  // row 0
  int64_t stride;
  int32_t first, last;  // rows that are there, of 16

  __device__ __forceinline__ uint64_t Row(int32_t row) const {
    return at + min(max(row, first), last - 1) * stride;
  }
  __device__ __forceinline__ uint32_t Present() const { return (1u << last) - (1u << first); }
};

template <int kDim>
__device__ __forceinline__ uint4 LoadPiece(uint64_t address) {
  return kDim < 128 ? LoadOnce128(address) : LoadOnce256(address);
}

template <int kDim>
class KeyTile {
 public:
  __device__ __forceinline__ void Load(const RowTile& rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t from = rows.Row(g + 8 * half) + 16 * t;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) x_[half][i] = LoadPiece<kDim>(from + 64 * i);
    }
  }
  // s[0..3]: rows g and g + 8, heads 2t and 2t + 1; of up to 4 heads, lanes t and t + 2 have the
  // same. Queries in T.
  template <typename T>
  __device__ __forceinline__ void Score(const QueryFragments<kDim>& q, bool wide,
                                        float (&s)[4]) const {
    const int lane = threadIdx.x % 32;
    float rest[4] = {0, 0, 0, 0};
    for (float& x : s) x = 0;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const uint4 a = x_[0][i], b = x_[1][i];
      Multiply<T>(s, a, b, q.at[0][0][i][lane]);
      if (wide) Multiply<T>(rest, a, b, q.at[0][1][i][lane]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += wide ? rest[i] : __shfl_xor_sync(kAllLanes, s[i], 2);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void Multiply(float (&s)[4], uint4 a, uint4 b, uint4 q) {
    MmaM16N8K16<T>(s, a.x, b.x, a.y, b.y, q.x, q.y);
    MmaM16N8K16<T>(s, a.z, b.z, a.w, b.w, q.z, q.w);
  }
  uint4 x_[2][kDim / 32];
};

template <int kDim>
class ValueTile {
 public:
  __device__ __forceinline__ void Load(const RowTile& rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint64_t from = rows.Row(2 * t + (r & 1) + 8 * (r >> 1)) + 16 * g;
#pragma unroll
      for (int j = 0; j < kDim / 64; ++j) x_[r][j] = LoadPiece<kDim>(from + 128 * j);
    }
  }
  // Product 4j + e holds channels 64j + 8g + 2e (rows g) and the next (rows g + 8). p0, p1: rows
  // {2t, 2t + 1} and {2t + 8, 2t + 9} of head g, in T.
  template <typename T>
  __device__ __forceinline__ void AddTo(float (&o)[kDim / 16][4], uint32_t p0, uint32_t p1) const {
#pragma unroll
    for (int j = 0; j < kDim / 64; ++j) {
      const uint4 a = x_[0][j], b = x_[1][j], c = x_[2][j], d = x_[3][j];
      Add<T>(o[4 * j], a.x, b.x, c.x, d.x, p0, p1);
      Add<T>(o[4 * j + 1], a.y, b.y, c.y, d.y, p0, p1);
      Add<T>(o[4 * j + 2], a.z, b.z, c.z, d.z, p0, p1);
      Add<T>(o[4 * j + 3], a.w, b.w, c.w, d.w, p0, p1);
    }
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void Add(float (&o)[4], uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d, uint32_t p0, uint32_t p1) {
    MmaM16N8K16<T>(o, LowHalves(a, b), HighHalves(a, b), LowHalves(c, d), HighHalves(c, d), p0, p1);
  }
  uint4 x_[4][kDim / 64];
};

// Two numbers in bf16, or what they lose by that.
__device__ __forceinline__ uint32_t PackPart(float a, float b, bool rest) {
  using E = Element<__nv_bfloat16>;
  const uint32_t high = E::Pack(a, b);
  if (!rest) return high;
  return E::Pack(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xFFFF0000u));
}

}  // namespace kvstrata::cuda
