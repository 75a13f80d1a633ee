// SPDX-License-Identifier: Apache-2.0
// A CTA has a group, its warps strips of 16 tokens, four tokens at a time (lane_rows.cuh). The four
// lanes that share a word OR it together.
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/pack_planes/device_runs.cuh"
#include "kernels/ops/pack_planes/lane_rows.cuh"
#include "kernels/ops/pack_planes/pack_planes_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr float kLastCode = 255;

template <int kDim>
struct Shared {
  float low[kWarps][kDim], high[kWarps][kDim];  // keys'
  float minimum[kDim], inverse[kDim];
};

// Minimum, step and 1 / step of numbers that share them (half_range.h).
struct DeviceRange {
  __half minimum, step;
  float low, inverse;

  __device__ static DeviceRange Of(float least, float largest) {
    DeviceRange range;
    range.minimum = WithoutSignOfZero(__float2half_rd(least));
    range.low = __half2float(range.minimum);
    range.step =
        WithoutSignOfZero(__float2half_ru(__fdiv_rn(__fsub_rn(largest, range.low), kLastCode)));
    const float size = __half2float(range.step);
    range.inverse = size > 0 ? __fdiv_rn(1.0f, size) : 0.0f;
    return range;
  }

 private:
  __device__ static __half WithoutSignOfZero(__half x) {
    return (__half_as_ushort(x) & 0x7FFF) == 0 ? __ushort_as_half(0) : x;
  }
};

// The code in the low byte: what is added rounds to whole numbers, ties to even.
__device__ __forceinline__ uint32_t CodeBits(float x, float low, float inverse) {
  return __float_as_uint(__fadd_rn(__fmul_rn(__fsub_rn(x, low), inverse), 0x1.8p23f));
}

__device__ __forceinline__ uint32_t LowBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Channels of a lane. Returns whether one of them does not count as it is.
template <typename T, int kDim>
__device__ __forceinline__ bool LoadRow(const char* row, float (&x)[LaneShape<kDim>::kLane]) {
  constexpr int kLane = LaneShape<kDim>::kLane, kEach = 16 / sizeof(T);
  const auto* const from = reinterpret_cast<const uint4*>(row) + threadIdx.x % 8 * (kLane / kEach);
  float largest = 0, nothing = 0;
#pragma unroll
  for (int i = 0; i < kLane / kEach; ++i) {
    alignas(16) T elements[kEach];
    *reinterpret_cast<uint4*>(elements) = from[i];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float own = FloatOf(elements[e]);
      x[i * kEach + e] = own;
      largest = fmaxf(largest, fabsf(own));
      nothing = fmaf(own, 0.0f, nothing);
    }
  }
  return largest > kQuantisedMax || isnan(nothing);
}

// Halves the words of lanes that differ by `step`: either keeps the half of its bit, ORed.
template <int kCount, int kSize>
__device__ __forceinline__ void OrHalves(uint32_t (&words)[kSize], int step) {
  const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint32_t kept = upper ? words[i + kCount / 2] : words[i];
    const uint32_t sent = upper ? words[i] : words[i + kCount / 2];
    words[i] = kept | __shfl_xor_sync(~0u, sent, step);
  }
}

// Words of two bits a code, from bit `first` of codes on, of one token. codes: of this lane, in the
// order of channels. Word i goes to to[i * stride].
template <int kDim>
__device__ __forceinline__ void StorePairs(const uint32_t (&codes)[LaneShape<kDim>::kFours],
                                           int first, uint32_t* to, int stride) {
  constexpr int kFours = LaneShape<kDim>::kFours;
  const int s = threadIdx.x % 8;
  uint32_t words[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    words[i] = (__byte_perm(codes[i], 0, 0x3120) >> first & 0x03030303u) << s / 2 * 2;
  }
  OrHalves<kFours>(words, 2);
  int at = s % 2 * kFours + (s >> 1 & 1) * (kFours / 2);
  if constexpr (kFours == 2) {
    words[0] |= __shfl_xor_sync(~0u, words[0], 4);
    if (s < 4) to[at * stride] = words[0];
  } else {
    OrHalves<kFours / 2>(words, 4);
    at += s / 4 * (kFours / 4);
#pragma unroll
    for (int i = 0; i < kFours / 4; ++i) to[(at + i) * stride] = words[i];
  }
}

// Words of the four lower bits of codes.
template <int kDim>
__device__ __forceinline__ void StoreNibbles(const uint32_t (&codes)[LaneShape<kDim>::kFours],
                                             uint32_t* to) {
  constexpr int kFours = LaneShape<kDim>::kFours;
  const int s = threadIdx.x % 8;
  uint32_t words[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    words[i] = (__byte_perm(codes[i], 0, 0x3120) & 0x0F0F0F0Fu) << s / 4 * 4;
  }
  OrHalves<kFours>(words, 4);
  const int at = s % 4 * kFours + s / 4 * (kFours / 2);
#pragma unroll
  for (int i = 0; i < kFours / 2; ++i) to[at + i] = words[i];
}

// Planes 1 and 2 of one token's key or value.
template <int kDim>
__device__ __forceinline__ void StoreLower(const uint32_t (&codes)[LaneShape<kDim>::kFours],
                                           int keep, char* to) {
  auto* const words = reinterpret_cast<uint32_t*>(to);
  StorePairs<kDim>(codes, 4, words, 1);
  if (keep == 8) StoreNibbles<kDim>(codes, words + kDim / 16);
}

// One group, and the rows that it is made of.
struct GroupPlace {
  DeviceRows keys, values;  // with the layer's and the head's offsets
  const uint64_t* key_pages;
  const uint64_t* value_pages;
  int32_t first;  // token
  int32_t tokens, keep, row_bytes;
  char *upper, *lower;

  __device__ const char* Strip(const DeviceRows& rows, const uint64_t* pages, int strip) const {
    const int32_t token = first + kStripTokens * strip, page = token / rows.page_rows;
    return reinterpret_cast<const char*>(pages[page]) + rows.offset +
           (token - page * rows.page_rows) * rows.row_stride;
  }
};

// Extremes of this lane's channels over its warp's strips. Returns whether a key does not count as
// it is.
template <typename T, int kDim, bool kCareful>
__device__ __forceinline__ bool FindExtremes(const GroupPlace& g, Shared<kDim>& shared) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float low[kLane], high[kLane];
#pragma unroll
  for (int c = 0; c < kLane; ++c) low[c] = INFINITY, high[c] = -INFINITY;
  bool is_strange = false;
#pragma unroll 1
  for (int strip = warp; strip < g.tokens / kStripTokens; strip += kWarps) {
    const char* const rows = g.Strip(g.keys, g.key_pages, strip);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float x[kLane];
      is_strange |= LoadRow<T, kDim>(rows + (4 * m + lane / 8) * g.keys.row_stride, x);
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        if constexpr (kCareful) x[c] = Counted(x[c]);
        low[c] = fminf(low[c], x[c]);
        high[c] = fmaxf(high[c], x[c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kLane; ++c) {
#pragma unroll
    for (int step = 8; step < 32; step *= 2) {
      low[c] = fminf(low[c], __shfl_xor_sync(~0u, low[c], step));
      high[c] = fmaxf(high[c], __shfl_xor_sync(~0u, high[c], step));
    }
    if (lane < 8) {
      shared.low[warp][lane * kLane + c] = low[c];
      shared.high[warp][lane * kLane + c] = high[c];
    }
  }
  return is_strange;
}

template <int kDim>
__device__ __forceinline__ void WriteKeyScales(const GroupPlace& g, Shared<kDim>& shared) {
  for (int c = threadIdx.x; c < kDim; c += kThreads) {
    float low = INFINITY, high = -INFINITY;
    for (int warp = 0; warp < min(kWarps, g.tokens / kStripTokens); ++warp) {
      low = fminf(low, shared.low[warp][c]);
      high = fmaxf(high, shared.high[warp][c]);
    }
    const DeviceRange range = DeviceRange::Of(low, high);
    shared.minimum[c] = range.low;
    shared.inverse[c] = range.inverse;
    reinterpret_cast<__half*>(g.upper)[c] = range.minimum;
    reinterpret_cast<__half*>(g.upper)[kDim + c] = range.step;
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void PackKeys(const GroupPlace& g, bool is_careful,
                                         const Shared<kDim>& shared) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  const int lane = threadIdx.x % 32, s = lane % 8;
  float low[kLane], inverse[kLane];
#pragma unroll
  for (int c = 0; c < kLane; ++c) {
    low[c] = shared.minimum[s * kLane + c];
    inverse[c] = shared.inverse[s * kLane + c];
  }
#pragma unroll 1
  for (int strip = threadIdx.x / 32; strip < g.tokens / kStripTokens; strip += kWarps) {
    const char* const rows = g.Strip(g.keys, g.key_pages, strip);
#pragma unroll 1
    for (int m = 0; m < 4; ++m) {
      const int in_strip = 4 * m + lane / 8, token = kStripTokens * strip + in_strip;
      float x[kLane];
      LoadRow<T, kDim>(rows + in_strip * g.keys.row_stride, x);
      if (is_careful) {
#pragma unroll
        for (int c = 0; c < kLane; ++c) x[c] = Counted(x[c]);
      }
      uint32_t codes[LaneShape<kDim>::kFours];
#pragma unroll
      for (int i = 0; i < kLane; i += 4) {
        codes[i / 4] = LowBytes(CodeBits(x[i], low[i], inverse[i]),
                                CodeBits(x[i + 1], low[i + 1], inverse[i + 1]),
                                CodeBits(x[i + 2], low[i + 2], inverse[i + 2]),
                                CodeBits(x[i + 3], low[i + 3], inverse[i + 3]));
      }
      StorePairs<kDim>(codes, 6, reinterpret_cast<uint32_t*>(g.upper + 4 * kDim) + token, g.tokens);
      StoreLower<kDim>(codes, g.keep, g.lower + token * g.row_bytes);
    }
  }
}

// Codes of four tokens' values, whose minima and steps are written.
template <typename T, int kDim>
__device__ __forceinline__ void CodeValues(const GroupPlace& g, const char* row, int token,
                                           uint32_t (&codes)[LaneShape<kDim>::kFours]) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  float x[kLane];
  const bool is_strange = LoadRow<T, kDim>(row, x);
  if (__any_sync(~0u, is_strange)) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) x[c] = Counted(x[c]);
  }
  Rotate<kDim>(x);
  float low = x[0], high = x[0];
#pragma unroll
  for (int c = 1; c < kLane; ++c) low = fminf(low, x[c]), high = fmaxf(high, x[c]);
  if (__any_sync(~0u, low < -kQuantisedMax || high > kQuantisedMax)) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) x[c] = Counted(x[c]);
    low = Counted(low), high = Counted(high);
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    low = fminf(low, __shfl_xor_sync(~0u, low, step));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
  }
  const DeviceRange range = DeviceRange::Of(low, high);
  if (threadIdx.x % 8 == 0) {
    auto* const scales = reinterpret_cast<__half*>(g.upper + 4 * kDim + g.tokens * kDim / 4);
    scales[token] = range.minimum;
    scales[g.tokens + token] = range.step;
  }
#pragma unroll
  for (int i = 0; i < kLane; i += 4) {
    codes[i / 4] = LowBytes(
        CodeBits(x[i], range.low, range.inverse), CodeBits(x[i + 1], range.low, range.inverse),
        CodeBits(x[i + 2], range.low, range.inverse), CodeBits(x[i + 3], range.low, range.inverse));
  }
}

// Plane 0 of a strip. bytes: of this lane's channels, four tokens each: those of its i.
template <int kDim>
__device__ __forceinline__ void StoreStrip(const uint32_t (&bytes)[LaneShape<kDim>::kFours],
                                           uint32_t* to) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  const int lane = threadIdx.x % 32, i = lane / 8;
  const int shift = 8 * (i == 1 ? 2 : i == 2 ? 1 : i);
  uint32_t words[kLane];
#pragma unroll
  for (int c = 0; c < kLane; ++c) words[c] = (bytes[c / 4] >> 8 * (c % 4) & 0xFF) << shift;
  OrHalves<kLane>(words, 8);
  OrHalves<kLane / 2>(words, 16);
  const int at = lane % 8 * kLane + i % 2 * (kLane / 2) + i / 2 * (kLane / 4);
#pragma unroll
  for (int c = 0; c < kLane / 4; ++c) to[at + c] = words[c];
}

template <typename T, int kDim>
__device__ __forceinline__ void PackValues(const GroupPlace& g) {
  constexpr int kFours = LaneShape<kDim>::kFours;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int strip = threadIdx.x / 32; strip < g.tokens / kStripTokens; strip += kWarps) {
    const char* const rows = g.Strip(g.values, g.value_pages, strip);
    uint32_t bytes[kFours] = {};
#pragma unroll 1
    for (int m = 0; m < 4; ++m) {
      const int in_strip = 4 * m + lane / 8, token = kStripTokens * strip + in_strip;
      uint32_t codes[kFours];
      CodeValues<T, kDim>(g, rows + in_strip * g.values.row_stride, token, codes);
      StoreLower<kDim>(codes, g.keep, g.lower + token * g.row_bytes + g.row_bytes / 2);
#pragma unroll
      for (int i = 0; i < kFours; ++i) bytes[i] |= (codes[i] >> 6 & 0x03030303u) << 2 * m;
    }
    const int codes_at = 4 * kDim + g.tokens * kDim / 4 + 4 * g.tokens;
    StoreStrip<kDim>(bytes, reinterpret_cast<uint32_t*>(g.upper + codes_at) + strip * kDim);
  }
}

// Grid (groups, kv_heads, batch * layers): a CTA has a group.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    PackPlanesKernel(const __grid_constant__ PackPlanesBatch w, int row_bytes, int upper_bytes) {
  __shared__ Shared<kDim> shared;
  const int head = blockIdx.y, layer = blockIdx.z / w.batch, sequence = blockIdx.z % w.batch;
  const int tokens = w.planes.format.tokens;
  WaitForPrevious();
  const int32_t group = w.from[sequence] / tokens + static_cast<int32_t>(blockIdx.x);
  if (group >= w.to[sequence] / tokens) return;
  GroupPlace g{w.keys, w.values};
  g.keys.offset += layer * w.row_layer_stride + head * w.keys.head_stride;
  g.values.offset += layer * w.row_layer_stride + head * w.values.head_stride;
  g.key_pages = w.keys.pages + int64_t{sequence} * w.keys.page_stride;
  g.value_pages = w.values.pages + int64_t{sequence} * w.values.page_stride;
  g.first = group * tokens;
  g.tokens = tokens;
  g.keep = w.planes.format.keep;
  g.row_bytes = row_bytes;
  const int64_t block = int64_t{sequence} * w.planes.block_stride + group / w.planes.block_groups;
  const int in_block = group % w.planes.block_groups;
  const auto first_run = [&](const DeviceRuns& runs, int64_t layer_stride) {
    const int64_t offset = runs.offset + layer * layer_stride + head * runs.head_stride;
    return reinterpret_cast<char*>(FirstRunIn(runs.blocks[block], offset));
  };
  g.upper = first_run(w.planes.upper, w.upper_layer_stride) + int64_t{in_block} * upper_bytes;
  g.lower =
      first_run(w.planes.lower, w.lower_layer_stride) + int64_t{in_block} * tokens * row_bytes;
  if (w.planes.hot_offset != 0 && threadIdx.x < DevicePlanes::kHotTagBytes / 4) {
    const DevicePlanes& p = w.planes;
    const DeviceRuns records{p.upper.blocks, p.hot_offset, p.hot_head_stride};
    reinterpret_cast<uint32_t*>(first_run(records, w.upper_layer_stride))[threadIdx.x] = 0;
  }
  const bool is_strange = FindExtremes<T, kDim, false>(g, shared);
  const bool is_careful = __syncthreads_or(is_strange);
  if (is_careful) {
    FindExtremes<T, kDim, true>(g, shared);
    __syncthreads();
  }
  WriteKeyScales(g, shared);
  __syncthreads();
  PackKeys<T>(g, is_careful, shared);
  PackValues<T, kDim>(g);
}

}  // namespace

int PackPlanesCuda(const PackPlanesBatch& w, Stream stream) {
  if (w.batch == 0 || w.groups_max == 0) return cudaSuccess;
  const PlanesFormat& f = w.planes.format;
  const auto is_valid = [&](const DeviceRows& rows) {
    return rows.head_dim == f.dim && rows.kv_heads == w.planes.kv_heads &&
           rows.dtype == w.keys.dtype && rows.page_rows % kStripTokens == 0;
  };
  if (!w.planes.IsValid() || !is_valid(w.keys) || !is_valid(w.values) || w.layers < 1 ||
      int64_t{w.batch} * w.layers > 65535) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(w.groups_max, w.planes.kv_heads, w.batch * w.layers);
  return ForRows(w.keys.dtype, f.dim, [&]<typename T, int kDim>() {
    return LaunchDependent(PackPlanesKernel<T, kDim>, grid, kThreads, 0, stream, w,
                           static_cast<int>(f.row_bytes()), static_cast<int>(f.upper_bytes()));
  });
}

}  // namespace kvstrata::cuda
