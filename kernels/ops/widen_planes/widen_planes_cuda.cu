// SPDX-License-Identifier: Apache-2.0
// A warp has strips of 16 tokens of a group, four tokens at a time (lane_rows.cuh): the values'
// words of a strip serve all four rounds.
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/pack_planes/device_runs.cuh"
#include "kernels/ops/pack_planes/lane_rows.cuh"
#include "kernels/ops/widen_planes/widen_planes_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// A sealed group of one KV head, and where its rows go.
struct GroupPlace {
  const char *upper, *lower;
  int32_t tokens, keep, row_bytes;  // a token's lower row
  char *keys, *values;              // its first token's
  int64_t stride;                   // from a token's row to the next's
};

// The words of two bits a code that this lane's channels are in, four codes each, as codes of
// channels in order.
template <int kDim>
__device__ __forceinline__ void AddPairs(const uint32_t* words, int stride, int first,
                                         uint32_t (&codes)[LaneShape<kDim>::kFours]) {
  constexpr int kFours = LaneShape<kDim>::kFours;
  const int s = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const uint32_t word = words[(s % 2 * kFours + i) * stride];
    codes[i] |= __byte_perm(word >> s / 2 * 2 & 0x03030303u, 0, 0x3120) << first;
  }
}

// Planes 1 and 2 of one token's key or value.
template <int kDim>
__device__ __forceinline__ void AddLower(const char* from, int keep,
                                         uint32_t (&codes)[LaneShape<kDim>::kFours]) {
  constexpr int kFours = LaneShape<kDim>::kFours;
  const auto* const words = reinterpret_cast<const uint32_t*>(from);
  AddPairs<kDim>(words, 1, 4, codes);
  if (keep != 8) return;
  const int s = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const uint32_t word = words[kDim / 16 + s % 4 * kFours + i];
    codes[i] |= __byte_perm(word >> s / 4 * 4 & 0x0F0F0F0Fu, 0, 0x3120);
  }
}

// The middle of a cell of code number c of the lane's.
template <int kFours>
__device__ __forceinline__ float MiddleOf(const uint32_t (&codes)[kFours], int c, int keep) {
  return static_cast<float>(codes[c / 4] >> 8 * (c % 4) & 0xFF) + (keep == 8 ? 0.0f : 7.5f);
}

template <typename T, int kDim>
__device__ __forceinline__ void StoreRow(const float (&x)[LaneShape<kDim>::kLane], char* row) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  alignas(16) T elements[kLane];
#pragma unroll
  for (int c = 0; c < kLane; ++c) elements[c] = Rounded<T>(x[c]);
  auto* const to = reinterpret_cast<uint4*>(row) + threadIdx.x % 8 * (kLane / 8);
#pragma unroll
  for (int i = 0; i < kLane / 8; ++i) to[i] = reinterpret_cast<const uint4*>(elements)[i];
}

template <typename T, int kDim>
__device__ __forceinline__ void WidenKeys(const GroupPlace& g) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  const int lane = threadIdx.x % 32;
  const auto* const scales = reinterpret_cast<const __half*>(g.upper) + lane % 8 * kLane;
  float minimum[kLane], step[kLane];
#pragma unroll
  for (int c = 0; c < kLane; ++c) {
    minimum[c] = __half2float(scales[c]);
    step[c] = __half2float(scales[kDim + c]);
  }
#pragma unroll 1
  for (int token = threadIdx.x / 8; token < g.tokens; token += kThreads / 8) {
    uint32_t codes[LaneShape<kDim>::kFours] = {};
    AddPairs<kDim>(reinterpret_cast<const uint32_t*>(g.upper + 4 * kDim) + token, g.tokens, 6,
                   codes);
    AddLower<kDim>(g.lower + token * g.row_bytes, g.keep, codes);
    float x[kLane];
#pragma unroll
    for (int c = 0; c < kLane; ++c) x[c] = fmaf(step[c], MiddleOf(codes, c, g.keep), minimum[c]);
    StoreRow<T, kDim>(x, g.keys + token * g.stride);
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void WidenValues(const GroupPlace& g) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  const int lane = threadIdx.x % 32, i = lane / 8;
  const int bit = 8 * (i == 1 ? 2 : i == 2 ? 1 : i);  // where token i of four has its digit
  const char* const scales = g.upper + 4 * kDim + g.tokens * kDim / 4;
  const auto* const all_words = reinterpret_cast<const uint32_t*>(scales + 4 * g.tokens);
#pragma unroll 1
  for (int strip = threadIdx.x / 32; strip < g.tokens / kStripTokens; strip += kWarps) {
    uint32_t words[kLane];
#pragma unroll
    for (int c = 0; c < kLane; ++c) words[c] = all_words[strip * kDim + lane % 8 * kLane + c];
#pragma unroll 1
    for (int m = 0; m < 4; ++m) {
      const int token = kStripTokens * strip + 4 * m + i;
      uint32_t codes[LaneShape<kDim>::kFours] = {};
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        codes[c / 4] |= (words[c] >> (bit + 2 * m) & 3) << (8 * (c % 4) + 6);
      }
      AddLower<kDim>(g.lower + token * g.row_bytes + g.row_bytes / 2, g.keep, codes);
      const float minimum = __half2float(reinterpret_cast<const __half*>(scales)[token]);
      const float step = __half2float(reinterpret_cast<const __half*>(scales)[g.tokens + token]);
      float x[kLane];
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        x[c] = Counted(fmaf(step, MiddleOf(codes, c, g.keep), minimum));
      }
      Rotate<kDim>(x);
      StoreRow<T, kDim>(x, g.values + token * g.stride);
    }
  }
}

// Rows that are not sealed, tokens [first, end): keys and values, 16 bytes a thread.
__device__ __forceinline__ void CopyRows(const WidenPlanesBatch& w, int head, int32_t first,
                                         int32_t end) {
  const int pieces = w.planes.format.dim / 8, sealed = w.groups * w.planes.format.tokens;
  const int64_t stride = int64_t{w.planes.kv_heads} * pieces;
  for (int i = threadIdx.x; i < (end - first) * 2 * pieces; i += kThreads) {
    const int32_t token = first + i / (2 * pieces), raw = token - sealed;
    const bool is_value = i / pieces % 2 != 0;
    const char* row;
    if (raw < w.raw) {
      const DeviceRows& rows = is_value ? w.raw_values : w.raw_keys;
      row = reinterpret_cast<const char*>(rows.pages[raw / rows.page_rows]) + rows.offset +
            head * rows.head_stride + raw % rows.page_rows * rows.row_stride;
    } else {
      const DeviceSource& rows = is_value ? w.new_v : w.new_k;
      row = static_cast<const char*>(rows.data) + (raw - w.raw) * rows.row_stride +
            head * rows.head_stride;
    }
    auto* const to = static_cast<uint4*>(is_value ? w.values : w.keys);
    to[token * stride + head * pieces + i % pieces] =
        reinterpret_cast<const uint4*>(row)[i % pieces];
  }
}

// Grid (tokens / a group's, kv_heads).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    WidenPlanesKernel(const __grid_constant__ WidenPlanesBatch w, int row_bytes, int upper_bytes) {
  const int head = blockIdx.y, tokens = w.planes.format.tokens;
  const auto group = static_cast<int32_t>(blockIdx.x);
  WaitForPrevious();
  LetNextStart();
  if (group >= w.groups) {
    const int32_t end = w.groups * tokens + w.raw + w.added;
    return CopyRows(w, head, group * tokens, min((group + 1) * tokens, end));
  }
  const DevicePlanes& p = w.planes;
  const int32_t block = group / p.block_groups, in_block = group % p.block_groups;
  GroupPlace g;
  const auto first_run = [&](const DeviceRuns& runs) {
    return reinterpret_cast<const char*>(
        FirstRunIn(runs.blocks[block], runs.offset + head * runs.head_stride));
  };
  g.upper = first_run(p.upper) + int64_t{in_block} * upper_bytes;
  g.lower = first_run(p.lower) + int64_t{in_block} * tokens * row_bytes;
  g.tokens = tokens;
  g.keep = p.format.keep;
  g.row_bytes = row_bytes;
  g.stride = int64_t{p.kv_heads} * kDim * int64_t{sizeof(T)};
  const int64_t first = int64_t{group} * tokens * g.stride + head * kDim * int64_t{sizeof(T)};
  g.keys = static_cast<char*>(w.keys) + first;
  g.values = static_cast<char*>(w.values) + first;
  WidenKeys<T, kDim>(g);
  WidenValues<T, kDim>(g);
}

bool IsValid(const WidenPlanesBatch& w) {
  const auto are_rows = [&](const DeviceRows& rows) {
    return w.raw == 0 || (rows.dtype == w.dtype && rows.page_rows > 0);
  };
  const auto is_source = [&](const DeviceSource& source) {
    return w.added == 0 || (source.dtype == w.dtype && source.IsAligned());
  };
  return w.planes.IsValid() && w.groups >= 0 && w.raw >= 0 && w.added >= 0 &&
         are_rows(w.raw_keys) && are_rows(w.raw_values) && is_source(w.new_k) && is_source(w.new_v);
}

}  // namespace

int WidenPlanesCuda(const WidenPlanesBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.tokens() == 0) return cudaSuccess;
  const PlanesFormat& f = w.planes.format;
  const dim3 grid((w.tokens() + f.tokens - 1) / f.tokens, w.planes.kv_heads);
  return ForRows(w.dtype, f.dim, [&]<typename T, int kDim>() {
    return LaunchDependent(WidenPlanesKernel<T, kDim>, grid, kThreads, 0, stream, w,
                           static_cast<int>(f.row_bytes()), static_cast<int>(f.upper_bytes()));
  });
}

}  // namespace kvstrata::cuda
