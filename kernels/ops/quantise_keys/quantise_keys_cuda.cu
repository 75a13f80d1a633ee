// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/quantise_keys/quantise_keys_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLane = 8;  // channels of a thread that looks for extremes: 16 bytes
constexpr int kDimMax = 256, kTokensMax = 256;

struct Shared {
  const char* rows[kTokensMax];
  float low[kThreads * kLane], high[kThreads * kLane];
  float minimum[kDimMax], inverse[kDimMax];
};

// NaN is 0; infinities and what no fp16 holds are the largest.
template <typename T>
__device__ float KeyOf(T key) {
  const float x = FloatOf(key);
  return isnan(x) ? 0.0f : fminf(fmaxf(x, -kQuantisedMax), kQuantisedMax);
}

// A zero is stored as +0.
__device__ __half WithoutSignOfZero(__half x) {
  return (__half_as_ushort(x) & 0x7FFF) == 0 ? __ushort_as_half(0) : x;
}

// Extremes of 8 channels over every `rows`-th token of the group.
template <typename T>
__device__ void FindExtremes(Shared& s, int dim, int tokens) {
  const int lanes = dim / kLane, rows = kThreads / lanes;
  const int channel = threadIdx.x % lanes * kLane, row = threadIdx.x / lanes;
  float low[kLane], high[kLane];
  for (int c = 0; c < kLane; ++c) low[c] = INFINITY, high[c] = -INFINITY;
#pragma unroll 4
  for (int t = row; t < tokens; t += rows) {
    alignas(16) T keys[kLane];
    *reinterpret_cast<uint4*>(keys) =
        *reinterpret_cast<const uint4*>(s.rows[t] + channel * sizeof(T));
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
      low[c] = fminf(low[c], KeyOf(keys[c]));
      high[c] = fmaxf(high[c], KeyOf(keys[c]));
    }
  }
  for (int c = 0; c < kLane; ++c) {
    s.low[row * dim + channel + c] = low[c];
    s.high[row * dim + channel + c] = high[c];
  }
}

// Minimum, step and 1 / step of each channel.
__device__ void WriteScales(Shared& s, int dim, int bits, char* group) {
  const int rows = kThreads / (dim / kLane);
  for (int c = threadIdx.x; c < dim; c += kThreads) {
    float low = s.low[c], high = s.high[c];
    for (int row = 1; row < rows; ++row) {
      low = fminf(low, s.low[row * dim + c]);
      high = fmaxf(high, s.high[row * dim + c]);
    }
    const __half minimum = WithoutSignOfZero(__float2half_rd(low));
    const float width = __fsub_rn(high, __half2float(minimum));
    const __half step =
        WithoutSignOfZero(__float2half_ru(__fdiv_rn(width, static_cast<float>((1 << bits) - 1))));
    const float size = __half2float(step);
    s.minimum[c] = __half2float(minimum);
    s.inverse[c] = size > 0 ? __fdiv_rn(1.0f, size) : 0.0f;
    reinterpret_cast<__half*>(group)[c] = minimum;
    reinterpret_cast<__half*>(group)[dim + c] = step;
  }
}

// Word i of a token in a plane of `width` bits of each code, from bit `first` on.
template <typename T>
__device__ uint32_t WordOf(const Shared& s, int dim, int width, int first, int token, int i) {
  const int run = dim * width / 8;
  uint32_t word = 0;
  for (int m = 0; m < 8 / width; ++m) {
    const int channel = m * run + 4 * i;
    alignas(8) T keys[4];
    *reinterpret_cast<uint2*>(keys) =
        *reinterpret_cast<const uint2*>(s.rows[token] + channel * sizeof(T));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float above = __fsub_rn(KeyOf(keys[c]), s.minimum[channel + c]);
      const auto code =
          static_cast<uint32_t>(__float2int_rn(__fmul_rn(above, s.inverse[channel + c])));
      const int byte = c == 1 ? 2 : c == 2 ? 1 : c;
      word |= (code >> first & ((1u << width) - 1)) << (8 * byte + width * m);
    }
  }
  return word;
}

template <typename T>
__device__ void WritePlane(const Shared& s, int dim, int tokens, int width, int first,
                           char* plane) {
  const int words = dim * width / 32 * tokens;
  for (int at = threadIdx.x; at < words; at += kThreads) {
    reinterpret_cast<uint32_t*>(plane)[at] =
        WordOf<T>(s, dim, width, first, at % tokens, at / tokens);
  }
}

// Grid (groups, kv_heads, batch * layers): a CTA has a group.
template <typename T>
__global__ __launch_bounds__(kThreads) void QuantiseKernel(
    const __grid_constant__ QuantiseKeysBatch w, const GroupOffsets f) {
  __shared__ Shared s;
  const int head = blockIdx.y, layer = blockIdx.z / w.batch, sequence = blockIdx.z % w.batch;
  const int32_t g = w.from[sequence] / f.tokens + static_cast<int32_t>(blockIdx.x);
  if (g >= w.to[sequence] / f.tokens) return;
  const int dim = w.groups.format.dim, bits = w.groups.format.bits;
  for (int t = threadIdx.x; t < f.tokens; t += kThreads) {
    const int32_t token = g * f.tokens + t, page = token / w.keys.page_rows;
    s.rows[t] =
        reinterpret_cast<const char*>(w.keys.pages[int64_t{sequence} * w.keys.page_stride + page]) +
        w.keys.offset + layer * w.key_layer_stride + head * w.keys.head_stride +
        (token - page * w.keys.page_rows) * w.keys.row_stride;
  }
  char* group =
      reinterpret_cast<char*>(
          w.groups.blocks[int64_t{sequence} * w.groups.block_stride + g / w.groups.block_groups]) +
      w.groups.offset + layer * w.group_layer_stride + head * w.groups.head_stride +
      g % w.groups.block_groups * f.bytes;
  __syncthreads();
  FindExtremes<T>(s, dim, f.tokens);
  __syncthreads();
  WriteScales(s, dim, bits, group);
  __syncthreads();
  WritePlane<T>(s, dim, f.tokens, bits == 3 ? 2 : bits, 0, group + f.codes);
  if (bits == 3) WritePlane<T>(s, dim, f.tokens, 1, 2, group + f.high);
}

template <typename T>
int Launch(const QuantiseKeysBatch& w, Stream stream) {
  const dim3 grid(w.groups_max, w.groups.kv_heads, w.batch * w.layers);
  QuantiseKernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      w, GroupOffsets::Of(w.groups.format));
  return cudaGetLastError();
}

}  // namespace

int QuantiseKeysCuda(const QuantiseKeysBatch& w, Stream stream) {
  if (w.batch == 0 || w.groups_max == 0) return cudaSuccess;
  if (w.layers < 1 || int64_t{w.batch} * w.layers > 65535) return cudaErrorInvalidValue;
  if (!w.groups.format.IsValid() || w.keys.head_dim != w.groups.format.dim ||
      w.keys.kv_heads != w.groups.kv_heads) {
    return cudaErrorInvalidValue;
  }
  switch (w.keys.dtype) {
    case DType::kBF16:
      return Launch<__nv_bfloat16>(w, stream);
    case DType::kF16:
      return Launch<__half>(w, stream);
    case DType::kF32:
      return cudaErrorInvalidValue;
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvstrata::cuda
