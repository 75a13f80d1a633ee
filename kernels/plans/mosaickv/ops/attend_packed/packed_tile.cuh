// SPDX-License-Identifier: Apache-2.0
// Tiles of 32 packed rows: from memory to shared memory, and from there what tensor cores or
// products take. By whole warps; a tile belongs to one warp, a row of it to one lane.
//
// A lane walks the channels that its row stores, in the order of its values; one that is not stored
// costs nothing:
//   keys    a value meets the queries of its channel, of which lanes have copies of their own
//           (QueryTable): none waits for a bank of shared memory that another one reads
//   values  are written to their channels of a tile of zeros, whose columns fragments of tensor
//           cores are read from (ValueTile)
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed_cuda.h"

namespace kvstrata::cuda {

inline constexpr int kTileRows = 32;

// How the rows of a segment lie, in memory as in shared memory: without gaps.
struct RowFormat {
  int32_t chunks;        // pieces of 16 bytes
  int32_t value_offset;  // bytes
  int32_t keep;          // values
  int32_t bits;          // bits of the map
  int32_t shift;         // log2 of `neighbours`

  static __host__ __device__ RowFormat Of(int stored_channels, int keep, int neighbours) {
    const int shift = neighbours == 4 ? 2 : neighbours == 2 ? 1 : 0;
    const int bits = stored_channels >> shift, value_offset = (bits + 127) / 128 * 16;
    return {value_offset / 16 + (2 * keep + 15) / 16, value_offset, keep, bits, shift};
  }
  __host__ __device__ int32_t neighbours() const { return 1 << shift; }
  __host__ __device__ int32_t channels() const { return bits << shift; }
  __host__ __device__ int32_t values() const { return keep < channels() ? keep : channels(); }
  __host__ __device__ int32_t words() const { return (bits + 31) / 32; }  // words of the map
  __host__ __device__ int32_t stride() const { return chunks * 16; }
  __host__ __device__ int32_t tile_bytes() const { return kTileRows * stride(); }
};

// Starts the copy of 16 bytes; of nothing, and zeros instead, where `real` is false. A row of zeros
// stores no channel.
__device__ __forceinline__ void CopyChunk(uint32_t to, uint64_t from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest `stages` - 1 copies of this warp are there. Stages: 1 .. 3.
__device__ __forceinline__ void AwaitOldestCopy(int stages) {
  if (stages == 3) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (stages == 2) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  __syncwarp();
}

// Keeps what is cheap to work out: the compiler would do it again at every use.
__device__ __forceinline__ void KeepInRegister(uint32_t& x) { asm("" : "+r"(x)); }

__device__ __forceinline__ uint4 LoadShared128(uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ float4 LoadSharedFloats(uint32_t at) {
  const uint4 x = LoadShared128(at);
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}
__device__ __forceinline__ void StoreShared128(uint32_t at, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
__device__ __forceinline__ uint32_t LoadShared16(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void StoreShared16(uint32_t at, uint32_t x) {
  asm volatile("{\n.reg .b16 l;\ncvt.u16.u32 l, %1;\nst.shared.u16 [%0], l;\n}" ::"r"(at), "r"(x)
               : "memory");
}
// Four 8x8 matrices of 16-bit elements, transposed; lane i says where row i % 8 of matrix i / 8 is.
__device__ __forceinline__ uint4 LoadTransposed(uint32_t at) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
// The place of the highest bit of x.
__device__ __forceinline__ uint32_t HighestBit(uint32_t x) {
  uint32_t place;
  asm("bfind.u32 %0, %1;" : "=r"(place) : "r"(x));
  return place;
}

// Which bits of a row's map are set, from the first on. Where a damaged map has too few, all are.
//
// The lowest bit is found, not the highest, although that takes an instruction more: what is left
// does not depend on where the bit was, and so the chain from bit to bit is half as long.
template <int kChannels>
class StoredBits {
  static constexpr int kWords = kChannels / 32;

 public:
  // Reads the map of the row at `row`. What belongs to its bits lies from `origin` on, `step` bytes
  // each.
  __device__ __forceinline__ StoredBits(uint32_t row, const RowFormat& f, uint32_t origin,
                                        uint32_t step)
      : origin_(origin), step_(32 * step) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 x = w < f.words() ? LoadShared128(row + 4 * w) : uint4{0, 0, 0, 0};
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4 && w + i < kWords; ++i) word_[w + i] = words[i];
    }
    const uint32_t last = ~0u >> (-f.bits & 31);  // the last word with all its bits
    if (f.bits != kChannels) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int after = f.words() - w - 1;
        word_[w] &= after > 0 ? ~0u : after == 0 ? last : 0;
      }
    }
    int stored = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) stored += __popc(word_[w]);
    const bool damaged = stored << f.shift < f.values();
    bool later = false;  // words with bits
#pragma unroll
    for (int w = kWords - 1; w >= 0; --w) {
      if (damaged) word_[w] = w < f.words() - 1 ? ~0u : w < f.words() ? last : 0;
      gaps_ |= later && word_[w] == 0;
      later |= word_[w] != 0;
    }
  }
  // Whether words without a bit lie before others: then bits are found by Next<true>.
  __device__ __forceinline__ bool HasGaps() const { return gaps_; }
  // The next bit's place from origin() on.
  template <bool kGaps>
  __device__ __forceinline__ uint32_t Next() {
    if (word_[0] == 0) Advance();
    if constexpr (kGaps) {
#pragma unroll
      for (int w = 0; w + 2 < kWords; ++w) {
        if (word_[0] == 0) Advance();
      }
    }
    uint32_t below = word_[0] - 1;
    KeepInRegister(below);
    const uint32_t place = HighestBit(word_[0] & ~below);
    word_[0] &= below;
    return place;
  }
  __device__ __forceinline__ uint32_t origin() const { return origin_; }

 private:
  __device__ __forceinline__ void Advance() {
#pragma unroll
    for (int w = 0; w + 1 < kWords; ++w) word_[w] = word_[w + 1];
    origin_ += step_;
  }

  uint32_t word_[kWords];
  uint32_t origin_;
  const uint32_t step_;
  bool gaps_ = false;
};

// visit(place, origin, shift, i, value) for every value of the lane's row at `row`: the i-th of
// the channels of the bit at `place` from `origin` on; a bf16 value in the high half. A row
// of zeros has values too. Eight values at a time, and one by one what is rare.
template <int kChannels, typename Visit>
__device__ __forceinline__ void ForEachValue(StoredBits<kChannels>& bits, uint32_t row,
                                             const RowFormat& f, Visit visit) {
  row += f.value_offset;
  int i = 0;
  if (!__any_sync(kAllLanes, f.shift != 0 || bits.HasGaps())) {
#pragma unroll 1
    for (; i + 8 <= f.values(); i += 8) {
      const uint4 x = LoadShared128(row + 2 * i);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t place = bits.template Next<false>();
        visit(place, bits.origin(), 0, 0, n % 2 == 0 ? pairs[n / 2] << 16 : pairs[n / 2]);
      }
    }
  }
  uint32_t place = 0;
#pragma unroll 1
  for (; i < f.values(); ++i) {
    const int nth = i & (f.neighbours() - 1);
    if (nth == 0) place = bits.template Next<true>();
    visit(place, bits.origin(), f.shift, nth, LoadShared16(row + 2 * i) << 16);
  }
}

// The queries of up to 4 heads by channels, fp32, in copies of which lanes of one access have one
// each.
template <int kChannels>
struct QueryTable {
  static constexpr int kCopies = kChannels > 128 ? 4 : 8;
  static constexpr int kChannelBytes = kCopies * 16;
  static constexpr int kBytes = kChannels * kChannelBytes;

  // The products of the lane's row at `row` and the queries of the table at `table`.
  static __device__ __forceinline__ float4 Products(uint32_t table, uint32_t row,
                                                    const RowFormat& f) {
    table += threadIdx.x % kCopies * 16;
    StoredBits<kChannels> bits(row, f, table, f.neighbours() * kChannelBytes);
    float4 sums = {0, 0, 0, 0};
    ForEachValue(bits, row, f,
                 [&](uint32_t place, uint32_t origin, int shift, int i, uint32_t value) {
                   const float x = __uint_as_float(value & 0xFFFF0000u);
                   const uint32_t channel = (place << shift) + i;
                   const float4 q = LoadSharedFloats(origin + channel * kChannelBytes);
                   sums = {sums.x + x * q.x, sums.y + x * q.y, sums.z + x * q.z, sums.w + x * q.w};
                 });
    return sums;
  }
};

// A tile's values in bf16, [32 rows][kChannels], and behind each row what it weighs for up to eight
// heads. A row is an odd number of 16 bytes: eight rows of a fragment lie in all banks.
template <int kChannels>
struct ValueTile {
  static constexpr int kWeightsAt = 2 * kChannels, kRowBytes = kWeightsAt + 16;
  static constexpr int kBytes = kTileRows * kRowBytes;

  // The lane's row of the tile at `tile`, from the row at `row`. Barrier of the warp before and
  // afterwards.
  static __device__ __forceinline__ void Fill(uint32_t tile, uint32_t row, uint4 weights,
                                              const RowFormat& f) {
    const uint32_t to = tile + threadIdx.x % 32 * kRowBytes;
    StoreShared128(to + kWeightsAt, weights);
#pragma unroll
    for (int i = 0; i < kChannels / 8; ++i) StoreShared128(to + i * 16, {0, 0, 0, 0});
    StoredBits<kChannels> bits(row, f, to, f.neighbours() * 2);
    ForEachValue(bits, row, f,
                 [](uint32_t place, uint32_t origin, int shift, int i, uint32_t value) {
                   StoreShared16(origin + 2 * ((place << shift) + i), value >> 16);
                 });
  }
  // The weights, as a right-hand fragment of rows by heads: {x, y} of rows 0..15, {z, w} of others.
  static __device__ __forceinline__ uint4 Weights(uint32_t tile) {
    return LoadTransposed(tile + threadIdx.x % 32 * kRowBytes + kWeightsAt);
  }
  // 16 channels of 16 rows, as a left-hand fragment of their transpose.
  static __device__ __forceinline__ uint4 Fragment(uint32_t tile, int channels, int rows) {
    const int lane = threadIdx.x % 32, row = 16 * rows + lane / 16 * 8 + lane % 8;
    return LoadTransposed(tile + row * kRowBytes + channels * 32 + lane / 8 % 2 * 16);
  }
};

}  // namespace kvstrata::cuda
