// The segments of one (sequence, KV head), and its queries rotated into one of them. In shared
// memory, by all threads of a CTA.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_

#include <algorithm>

#include "kernels/cuda/float_bits.cuh"
#include "kernels/ops/attend_packed/packed_tile.cuh"

namespace kvstrata::cuda {

inline constexpr int kPackedHeads = 8;    // query heads of a KV head
inline constexpr int kTableHeads = 4;     // of a QueryTable
inline constexpr int kSegmentsMax = 128;  // of a sequence

// kChannels: those that rows may store, rounded up to 32. Threads of a CTA: 128 registers each, or
// twice as many for the longer rows.
template <int kDim, int kChannels>
struct PackedShape {
  static constexpr int kThreadsMax = kDim == 256 ? 256 : 512;
};

struct SegmentTable {
  PackedSegment at[kSegmentsMax];
  int32_t count;

  // Barrier afterwards.
  __device__ __forceinline__ void Load(const PackedLayer& layer, int sequence, int head) {
    // The table is read without waiting for its length: what lies behind the end is not used.
    const auto* from = reinterpret_cast<const uint4*>(
        layer.segments + int64_t{sequence} * layer.segment_stride * layer.kv_heads + head);
    for (int i = threadIdx.x; i < layer.segment_stride * 4; i += blockDim.x) {
      reinterpret_cast<uint4*>(at)[i] = from[int64_t{i / 4} * layer.kv_heads * 4 + i % 4];
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

  // rotated = the first kChannels of R q. Eight lanes take a row of R. Barrier afterwards.
  __device__ __forceinline__ void Rotate(uint64_t r, int group) {
    constexpr int kVectors = kDim / 32;  // of a row and lane
    const auto* rows = reinterpret_cast<const float4*>(r);
    const int lane = threadIdx.x % 8;
#pragma unroll 2
    for (int c = threadIdx.x / 8; c < kChannels; c += blockDim.x / 8) {
      float4 x[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) x[i] = rows[c * (kDim / 4) + 8 * i + lane];
#pragma unroll 1
      for (int first = 0; first < group; first += kTableHeads) {
        float sums[kTableHeads];
        Dots(x, first, sums);
        if (lane == 0) {
          for (int h = 0; h < kTableHeads; ++h) rotated[first + h][c] = sums[h];
        }
      }
    }
  }

  // A QueryTable for every four heads. Barriers before and afterwards.
  __device__ __forceinline__ void FillTables(char* tables, const RowFormat& f, int group) const {
    using Table = QueryTable<kChannels>;
    for (int first = 0; first < group; first += kTableHeads) {
      auto* const table = reinterpret_cast<float4*>(tables + first / kTableHeads * Table::kBytes);
      for (int i = threadIdx.x; i < f.channels() * Table::kCopies; i += blockDim.x) {
        const int channel = EntryChannel(i / Table::kCopies, f);
        const auto of = [&](int head) { return head < group ? rotated[head][channel] : 0.0f; };
        table[i] = {of(first), of(first + 1), of(first + 2), of(first + 3)};
      }
    }
  }
  static __host__ __device__ __forceinline__ int TablesOf(int group) {
    return (group + kTableHeads - 1) / kTableHeads;
  }

 private:
  // Of heads from `first` on, over eight lanes, whose row is `x`. kChannels and the threads of a
  // CTA are multiples of 32, so that warps are whole here. Heads that are none give anything.
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

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_
