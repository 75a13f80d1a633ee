// SPDX-License-Identifier: Apache-2.0
// One warp's attention of rows of one run of segments, in tiles of 32: its softmax, and sums of
// weighted values that are not rotated back yet.
#pragma once

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"
#include "kernels/ops/merge/merge_row.cuh"
#include "kernels/plans/mosaickv/ops/attend_packed/chosen_blocks.cuh"

namespace kvstrata::cuda {

__device__ __forceinline__ float SumOfLanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ float MaxOfLanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The softmax of one warp over rows of which every lane has one, and its sums of weighted values:
// o[i] is the accumulator of channels 16i + g and 16i + 8 + g, heads 2t and 2t + 1.
template <int kProducts>
struct RowSoftmax {
  using Weight = __nv_bfloat16;            // as the values, whatever the model's dtype
  float m[kPackedHeads], l[kPackedHeads];  // m the same in all lanes, in powers of two
  float o[kProducts][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      m[h] = -INFINITY;
      l[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < kProducts; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  }
  // Logits of the lane's row, in powers of two, to weights. Heads come in fours; those behind the
  // last are some number. Every tile has a row, whose logit is more than -inf.
  __device__ __forceinline__ uint4 Weigh(float (&s)[kPackedHeads], int heads) {
    bool higher = false;
    ForEachHead(heads, [&](int h) { higher |= s[h] > m[h] + kSlack; });
    if (__any_sync(kAllLanes, higher)) RaiseMaxima(s, heads);
    ForEachHead(heads, [&](int h) {
      s[h] = Exp2(s[h] - m[h]);
      l[h] += s[h];
    });
    using E = Element<Weight>;
    uint4 weights = {E::Pack(s[0], s[1]), E::Pack(s[2], s[3]), 0, 0};
    if (heads > kTableHeads) weights.z = E::Pack(s[4], s[5]), weights.w = E::Pack(s[6], s[7]);
    return weights;
  }

 private:
  // A logit may exceed the maximum so far by so many powers of two: raising it for each that is a
  // little higher would mean most tiles.
  static constexpr float kSlack = 8;

  template <typename Visit>
  static __device__ __forceinline__ void ForEachHead(int heads, Visit visit) {
#pragma unroll
    for (int h = 0; h < kTableHeads; ++h) visit(h);
    if (heads <= kTableHeads) return;
#pragma unroll
    for (int h = kTableHeads; h < kPackedHeads; ++h) visit(h);
  }
  __device__ __forceinline__ void RaiseMaxima(const float (&s)[kPackedHeads], int heads) {
    const int t = threadIdx.x % 4;
    float of_lane[2] = {1, 1};
    ForEachHead(heads, [&](int h) {
      const float top = fmaxf(m[h], MaxOfLanes(s[h]));
      const float weight = WeightOf(m[h], top);
      m[h] = top;
      l[h] *= weight;
      if (h / 2 == t) of_lane[h % 2] = weight;
    });
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] *= of_lane[j % 2];
    }
  }
};

template <int kChannels>
class RowAttention {
  using Table = QueryTable<kChannels>;
  using Tile = ValueTile<kChannels>;

 public:
  using Softmax = RowSoftmax<kChannels / 16>;
  static constexpr int kOtherBytes = Tile::kBytes;  // a warp's bytes before its rows

  // `own`: the warp's part of shared memory.
  __device__ __forceinline__ RowAttention(float scale, uint32_t tables, uint32_t own)
      : scale_(scale), tables_(tables), own_(own) {}

  // Forgets the run before.
  __device__ __forceinline__ void Open(const RowFormat& format) {
    format_ = format;
    softmax_.Clear();
  }
  __device__ __forceinline__ void Begin(const TileRows& rows) {
    const auto first = static_cast<int32_t>(threadIdx.x / 32);
    Issue<true>(rows, first);
    Issue<false>(rows, first);
  }
  // Keys of the next tile are on their way while values of this one are attended, and so on.
  __device__ __forceinline__ void Run(const TileRows& rows, int group) {
    const auto warps = static_cast<int32_t>(blockDim.x / 32);
#pragma unroll 1
    for (auto tile = static_cast<int32_t>(threadIdx.x / 32); tile < rows.tiles(); tile += warps) {
      AwaitOldestCopy(2);
      const uint4 weights = Weigh(rows.Has(tile), group);
      Issue<true>(rows, tile + warps);
      AwaitOldestCopy(2);
      Tile::Fill(own_, Values() + OwnRow(), weights, format_);
      Issue<false>(rows, tile + warps);
      AddRows();
    }
  }
  __device__ __forceinline__ Softmax& softmax() { return softmax_; }
  __device__ __forceinline__ const RowFormat& format() const { return format_; }

 private:
  __device__ __forceinline__ uint32_t Keys() const { return own_ + kOtherBytes; }
  __device__ __forceinline__ uint32_t Values() const { return Keys() + format_.tile_bytes(); }
  __device__ __forceinline__ uint32_t OwnRow() const {
    return threadIdx.x % 32 * static_cast<uint32_t>(format_.stride());
  }
  // What the lane's row weighs, for every head.
  __device__ __forceinline__ uint4 Weigh(bool present, int group) {
    const uint32_t key = Keys() + OwnRow();
    float s[kPackedHeads];
#pragma unroll
    for (int first = 0; first < kPackedHeads; first += kTableHeads) {
      if (first >= group) break;
      const float4 products =
          Table::Products(tables_ + first / kTableHeads * Table::kBytes, key, format_);
      s[first] = present ? products.x * scale_ : -INFINITY;
      s[first + 1] = present ? products.y * scale_ : -INFINITY;
      s[first + 2] = present ? products.z * scale_ : -INFINITY;
      s[first + 3] = present ? products.w * scale_ : -INFINITY;
    }
    return softmax_.Weigh(s, group);
  }
  __device__ __forceinline__ void AddRows() {
    const uint4 p = Tile::Weights(own_);
    const int products = format_.channels() / 16;
#pragma unroll
    for (int i = 0; i < kChannels / 16; ++i) {
      if (i >= products) break;
      const uint4 low = Tile::Fragment(own_, i, 0), high = Tile::Fragment(own_, i, 1);
      using Weight = Softmax::Weight;
      MmaM16N8K16<Weight>(softmax_.o[i], low.x, low.y, low.z, low.w, p.x, p.y);
      MmaM16N8K16<Weight>(softmax_.o[i], high.x, high.y, high.z, high.w, p.z, p.w);
    }
  }
  // A tile's keys or values: the lanes of a block copy it in turn, and the blocks of a tile follow
  // each other. What is no row is zeros.
  template <bool kKeys>
  __device__ __forceinline__ void Issue(const TileRows& rows, int32_t tile) const {
    __syncwarp();
    if (tile < rows.tiles()) {
      const auto lane = static_cast<int32_t>(threadIdx.x % 32);
      const int32_t shift = rows.block_shift, step = 16 << shift;
      const int32_t nth = lane >> shift, inside = lane * 16 & (step - 1);
      const int32_t entry = (tile * kTileRows >> shift) + nth, block = format_.stride() << shift;
      const uint64_t key = rows.keys[min(entry, rows.count - 1)];
      const int32_t bytes = entry < rows.count ? TileRows::RowsOf(key) * format_.stride() : 0;
      uint64_t from = kKeys ? key & ~uint64_t{15} : rows.values[min(entry, rows.count - 1)];
      uint32_t to = (kKeys ? Keys() : Values()) + static_cast<uint32_t>(nth * block + inside);
      from += static_cast<uint64_t>(inside);
      if (shift == 3 && format_.chunks == 5) {  // as presets have it: nothing to work out
#pragma unroll
        for (int32_t at = 0; at < 5 * 128; at += 128) {
          CopyChunk(to + at, from + at, inside + at < bytes);
        }
      } else {
#pragma unroll 1
        for (int32_t at = inside; at < block; at += step) {
          CopyChunk(to, from, at < bytes);
          to += static_cast<uint32_t>(step);
          from += static_cast<uint64_t>(step);
        }
      }
    }
    EndCopies();
  }

  const float scale_;
  const uint32_t tables_, own_;
  RowFormat format_;
  Softmax softmax_;
};

}  // namespace kvstrata::cuda
