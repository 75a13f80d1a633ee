// SPDX-License-Identifier: Apache-2.0
// The segments of one (sequence, KV head), and its queries rotated into one of them. In shared
// memory, by all threads of a CTA.
#pragma once

#include <algorithm>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/plans/mosaickv/ops/attend_packed/packed_tile.cuh"

namespace kvstrata::cuda {

inline constexpr int kPackedHeads = 8;    // query heads of a KV head
inline constexpr int kTableHeads = 4;     // heads of a QueryTable
inline constexpr int kSegmentsMax = 512;  // segments of a sequence, at most

// kChannels: those that rows may store, rounded up to 32. Threads of a CTA: 128 registers each, or
// twice as many for the longer rows.
template <int kDim, int kChannels>
struct PackedShape {
  static constexpr int kThreadsMax = kDim == 256 ? 256 : 512;
};

// Lies at the beginning of a CTA's dynamic shared memory, and is as large as the layer has room
// for.
class SegmentTable {
  static constexpr int kEntry = sizeof(PackedSegment) / sizeof(uint4);

 public:
  PackedSegment* const at;
  int32_t& count;

  __device__ __forceinline__ SegmentTable(uint4* dynamic, int32_t& count_in_shared_memory)
      : at(reinterpret_cast<PackedSegment*>(dynamic)), count(count_in_shared_memory) {}
  static __host__ __device__ __forceinline__ int BytesOf(const PackedLayer& layer) {
    return layer.segment_stride * int{sizeof(PackedSegment)};
  }
  // Where the rest of the dynamic shared memory begins.
  static __device__ __forceinline__ uint4* Behind(uint4* dynamic, const PackedLayer& layer) {
    return dynamic + layer.segment_stride * kEntry;
  }
  // Barrier afterwards.
  __device__ __forceinline__ void Load(const PackedLayer& layer, int sequence, int head) const {
    // The table is read without waiting for its length: what lies behind the end is not used.
    const auto* from = reinterpret_cast<const uint4*>(
        layer.segments + int64_t{sequence} * layer.segment_stride * layer.kv_heads + head);
    for (int i = threadIdx.x; i < layer.segment_stride * kEntry; i += blockDim.x) {
      const int64_t entry = int64_t{i / kEntry} * layer.kv_heads;
      reinterpret_cast<uint4*>(at)[i] = from[entry * kEntry + i % kEntry];
    }
    if (threadIdx.x == 0) count = min(max(layer.counts[sequence], 0), layer.segment_stride);
  }
  static __device__ __forceinline__ int32_t EndBlock(const PackedSegment& s) {
    return s.first_block + static_cast<int32_t>(static_cast<uint32_t>(s.rows + s.block - 1) /
                                                static_cast<uint32_t>(s.block));
  }
  __device__ __forceinline__ int32_t blocks() const {
    return count == 0 ? 0 : EndBlock(at[count - 1]);
  }
  // Whether segment i > 0 has the rotations and the format of the one before, as extents do that a
  // segment of tokens is cut into.
  __device__ __forceinline__ bool Continues(int i) const {
    const PackedSegment &s = at[i], &before = at[i - 1];
    return s.r_k == before.r_k && s.r_v == before.r_v && s.keep == before.keep &&
           s.neighbours == before.neighbours && s.block == before.block;
  }
  // The segment that a block lies in, by one thread. REQUIRES: there is one.
  __device__ __forceinline__ int Holding(int32_t block) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (at[middle].first_block <= block ? low : high) = middle;
    }
    return low;
  }
  // The segment that a block lies in. By whole warps.
  __device__ __forceinline__ int Of(int32_t block) const {
    int before = 0;
    for (int first = 0; first < count; first += 32) {
      const int i = first + static_cast<int>(threadIdx.x % 32);
      before += __popc(__ballot_sync(kAllLanes, i < count && at[i].first_block <= block));
    }
    return max(before - 1, 0);
  }
};

// The first kChannels rows of a rotation to the L2, by all threads of a CTA.
template <int kDim, int kChannels>
__device__ __forceinline__ void PrefetchRotation(uint64_t r) {
  constexpr int kLine = 128, kBytes = kChannels * kDim * int{sizeof(float)};
  for (int at = threadIdx.x * kLine; at < kBytes; at += blockDim.x * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(r + at));
  }
}

// Rows of a rotation that a thread multiplies first, on their way from memory. Eight lanes have a
// row: lane i its vectors i, i + 8, ...
template <int kDim, int kChannels>
struct FirstRows {
  static constexpr int kVectors = kDim / 32, kRows = kDim == 128 ? 2 : 1;
  float4 x[kRows][kVectors];

  __device__ __forceinline__ void Load(uint64_t r) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) LoadRow(r, n, x[n]);
  }
  // The thread's n-th row; one behind the last is the last.
  static __device__ __forceinline__ int RowOf(int n) {
    return static_cast<int>(threadIdx.x + n * blockDim.x) / 8;
  }
  static __device__ __forceinline__ void LoadRow(uint64_t r, int n, float4 (&x)[kVectors]) {
    const auto* row =
        reinterpret_cast<const float4*>(r) + min(RowOf(n), kChannels - 1) * (kDim / 4);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = row[8 * i + threadIdx.x % 8];
  }
};

template <int kDim, int kChannels>
struct RotatedQueries {
  alignas(16) float given[kPackedHeads][kDim];
  float rotated[kPackedHeads][kChannels];

  // Barrier afterwards.
  __device__ __forceinline__ void Load(const PackedQueries& from, int sequence, int head) {
    const int64_t first = sequence * from.stride + int64_t{head} * from.group * kDim;
    for (int i = threadIdx.x; i < from.group * kDim / 8; i += blockDim.x) {
      float x[8];
      LoadFloats(from.q, from.dtype, first + 8 * i, x);
      for (int e = 0; e < 8; ++e) given[0][8 * i + e] = x[e];
    }
  }

  // rotated = the first kChannels of R q, for R at `r`, whose `first` rows are there. Barrier
  // afterwards.
  __device__ __forceinline__ void Rotate(uint64_t r, const FirstRows<kDim, kChannels>& first,
                                         int group) {
    using Rows = FirstRows<kDim, kChannels>;
#pragma unroll
    for (int n = 0; n < Rows::kRows; ++n) RotateRow(first.x[n], Rows::RowOf(n), group);
#pragma unroll 1
    for (int n = Rows::kRows; Rows::RowOf(n) < kChannels; ++n) {
      float4 x[Rows::kVectors];
      Rows::LoadRow(r, n, x);
      RotateRow(x, Rows::RowOf(n), group);
    }
  }

  // A QueryTable for every four heads. Barriers before and afterwards.
  __device__ __forceinline__ void FillTables(char* tables, int group) const {
    using Table = QueryTable<kChannels>;
    for (int first = 0; first < group; first += kTableHeads) {
      auto* const table = reinterpret_cast<float4*>(tables + first / kTableHeads * Table::kBytes);
      for (int i = threadIdx.x; i < kChannels * Table::kCopies; i += blockDim.x) {
        const int channel = i / Table::kCopies;
        const auto of = [&](int head) { return head < group ? rotated[head][channel] : 0.0f; };
        table[i] = {of(first), of(first + 1), of(first + 2), of(first + 3)};
      }
    }
  }
  static __host__ __device__ __forceinline__ int TablesOf(int group) {
    return (group + kTableHeads - 1) / kTableHeads;
  }

 private:
  // Row c of R, of which eight lanes have `x`. By whole warps, as the threads of a CTA and
  // kChannels are multiples of 32.
  __device__ __forceinline__ void RotateRow(const float4 (&x)[kDim / 32], int c, int group) {
    if (c >= kChannels) return;
#pragma unroll 1
    for (int first = 0; first < group; first += kTableHeads) {
      float sums[kTableHeads];
      Dots(x, first, sums);
      if (threadIdx.x % 8 == 0) {
        for (int h = 0; h < kTableHeads; ++h) rotated[first + h][c] = sums[h];
      }
    }
  }
  // For heads from `first` on. Heads past the last give any value.
  __device__ __forceinline__ void Dots(const float4 (&x)[kDim / 32], int first,
                                       float (&sums)[kTableHeads]) const {
#pragma unroll
    for (int h = 0; h < kTableHeads; ++h) {
      const auto* q = reinterpret_cast<const float4*>(given[first + h]);
      sums[h] = 0;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const float4 y = q[8 * i + threadIdx.x % 8];
        sums[h] += x[i].x * y.x + x[i].y * y.y + x[i].z * y.z + x[i].w * y.w;
      }
    }
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
  }
};

// launch.template operator()<kDim, kChannels>() for a layer that kernels exist for, else
// cudaErrorInvalidValue.
template <typename Launch>
int ForPacked(const PackedLayer& layer, Launch launch) {
  if (layer.kv_heads < 1 || layer.segment_stride < 0 || layer.segment_stride > kSegmentsMax ||
      layer.keep_max < 0 || layer.keep_max > layer.head_dim) {
    return cudaErrorInvalidValue;
  }
  const bool cut = layer.truncated;
  switch (layer.head_dim) {
    case 64:
      return launch.template operator()<64, 64>();
    case 128:
      return cut ? launch.template operator()<128, 96>() : launch.template operator()<128, 128>();
    case 256:
      return cut ? launch.template operator()<256, 192>() : launch.template operator()<256, 256>();
    default:
      return cudaErrorInvalidValue;
  }
}

inline bool IsValid(const PackedQueries& q) {
  return q.batch >= 0 && q.group >= 1 && q.group <= kPackedHeads && q.stride % 8 == 0;
}

// Channels that a row of a layer may store.
inline __host__ __device__ int StoredChannels(const PackedLayer& layer) {
  return layer.truncated ? layer.head_dim - layer.head_dim / 4 : layer.head_dim;
}
inline RowFormat LargestFormat(const PackedLayer& layer) {
  return RowFormat::Of(StoredChannels(layer), layer.keep_max, 1);
}

// How a CTA's dynamic shared memory is divided: tables, then a part for every warp.
struct WarpMemory {
  int32_t warps, stages, warp_bytes, table_bytes;

  int total() const { return table_bytes + warps * warp_bytes; }
  // Where a warp's part is, of shared memory from `begin` on.
  __device__ __forceinline__ uint32_t PartOf(uint32_t begin, int warp) const {
    uint32_t part = begin + static_cast<uint32_t>(table_bytes + warp * warp_bytes);
    KeepInRegister(part);
    return part;
  }

  // For a kernel with `static_bytes` besides, whose warps have up to `stages` stages and other
  // bytes. Warps: an even number.
  static WarpMemory Of(int threads_max, int static_bytes, int stages, int stage_bytes,
                       int other_bytes, int table_bytes) {
    constexpr int kOfSm = 227 * 1024, kManyWarps = 12;
    const int left = kOfSm - static_bytes - table_bytes;
    const auto fit = [&] {
      return std::min(threads_max / 32, left / (stages * stage_bytes + other_bytes)) / 2 * 2;
    };
    while (stages > 1 && fit() < kManyWarps) --stages;
    return {std::max(fit(), 2), stages, stages * stage_bytes + other_bytes, table_bytes};
  }
};

}  // namespace kvstrata::cuda
