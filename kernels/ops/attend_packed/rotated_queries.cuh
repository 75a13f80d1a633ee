// The segments of one (sequence, KV head), and its queries rotated into one of them. In shared
// memory, by all threads of a CTA.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_

#include "kernels/cuda/float_bits.cuh"
#include "kernels/cuda/fragments.cuh"
#include "kernels/ops/attend_packed/packed_tile.cuh"

namespace kvstrata::cuda {

inline constexpr int kPackedHeads = 8;    // query heads of a product
inline constexpr int kSegmentsMax = 128;  // of a sequence

// kChannels: those that rows may store, rounded up to 32. Warps of a CTA: 128 registers a thread,
// or twice as many for the longer rows.
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

template <int kDim, int kChannels>
struct RotatedQueries {
  alignas(16) float given[kPackedHeads][kDim];
  float rotated[kPackedHeads][kChannels];
  uint2 fragments[2][kChannels / 16][32];  // [high, low][product][lane]

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
      for (int h = 0; h < group; ++h) {
        const float sum = Dot(x, reinterpret_cast<const float4*>(given[h]));
        if (lane == 0) rotated[h][c] = sum;
      }
    }
  }

  // The rotated queries as right-hand fragments of KeyRuns. Columns are heads; of up to 4 heads,
  // columns 4..7 of `high` are what the first four lose by rounding, and of more, `low` is.
  // Barriers before and afterwards.
  __device__ __forceinline__ void MakeFragments(int group) {
    constexpr int kFragments = kChannels / 16 * 32;
    const int lows = group > 4 ? 2 : 1;
    for (int i = threadIdx.x; i < lows * kFragments; i += blockDim.x) {
      (&fragments[0][0][0])[i] = FragmentOf(i % kFragments / 32, i % 32, group, i >= kFragments);
    }
  }
  // s[0..3]: rows g and g + 8 of the tile, heads 2t and 2t + 1; of up to 4 heads, lanes t and t + 2
  // have the same.
  __device__ __forceinline__ void Score(const KeyRuns<kChannels>& keys, uint32_t tile,
                                        int32_t stride, bool wide, float (&s)[4]) const {
    using T = __nv_bfloat16;
    const int lane = threadIdx.x % 32;
    float rest[4] = {0, 0, 0, 0};
    for (float& x : s) x = 0;
    keys.ForEach(tile, stride, [&](int i, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
      const uint2 high = fragments[0][i][lane];
      MmaM16N8K16<T>(s, a0, a1, a2, a3, high.x, high.y);
      if (!wide) return;
      const uint2 low = fragments[1][i][lane];
      MmaM16N8K16<T>(rest, a0, a1, a2, a3, low.x, low.y);
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += wide ? rest[i] : __shfl_xor_sync(kAllLanes, s[i], 2);
  }

 private:
  __device__ __forceinline__ uint2 FragmentOf(int i, int lane, int group, bool low) const {
    const int column = lane / 4, t = lane % 4;
    const bool wide = group > 4;
    const int head = wide ? column : column % 4;
    if (head >= group) return {0, 0};
    const float* x = &rotated[head][KeyRuns<kChannels>::kRun * t + 4 * i];
    const bool rest = wide ? low : column >= 4;
    return {Pair(x[0], x[1], rest), Pair(x[2], x[3], rest)};
  }
  static __device__ __forceinline__ uint32_t Pair(float a, float b, bool rest) {
    using E = Element<__nv_bfloat16>;
    const uint32_t high = E::Pack(a, b);
    if (!rest) return high;
    return E::Pack(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xFFFF0000u));
  }
  // Over eight lanes, whose row is `x`. kChannels and the threads of a CTA are multiples of 32, so
  // that warps are whole here.
  static __device__ __forceinline__ float Dot(const float4 (&x)[kDim / 32], const float4* q) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const float4 y = q[8 * i + threadIdx.x % 8];
      sum += x[i].x * y.x + x[i].y * y.y + x[i].z * y.z + x[i].w * y.w;
    }
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
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

// Warps of a CTA whose tiles of `tile_bytes` fit, a multiple of 2, and their memory.
struct TileRings {
  int warps, bytes;
  static TileRings Of(int threads_max, int tile_bytes) {
    constexpr int kMost = 180 * 1024;
    const int each = kStages * tile_bytes;
    int warps = threads_max / 32;
    while (warps > 2 && warps * each > kMost) warps -= 2;
    return {warps, warps * each + kTileSlack};
  }
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PACKED_ROTATED_QUERIES_CUH_
