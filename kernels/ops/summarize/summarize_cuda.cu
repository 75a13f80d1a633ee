// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/ops/summarize/summarize.h"
#include "kernels/ops/summarize/summarize_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLane = 8;  // channels of a thread: 16 bytes of a 16-bit dtype

template <typename T>
struct alignas(16) Channels {
  T at[kLane];
};

__device__ char* RowOf(const DeviceRows& rows, int sequence, int head, int32_t r) {
  const int32_t page = r / rows.page_rows;
  return reinterpret_cast<char*>(rows.pages[int64_t{sequence} * rows.page_stride + page]) +
         rows.offset + head * rows.head_stride + (r - page * rows.page_rows) * rows.row_stride;
}

template <typename T>
__device__ Channels<T> Load(const DeviceRows& rows, int sequence, int head, int32_t r,
                            int channel) {
  return *reinterpret_cast<const Channels<T>*>(RowOf(rows, sequence, head, r) +
                                               channel * sizeof(T));
}

// visit(channels) for the rows of a unit in order, several loads ahead.
template <typename T, typename Visit>
__device__ void ForEachRow(const SummarizeBatch& w, int sequence, int head, int32_t unit,
                           int channel, Visit visit) {
  constexpr int kAhead = 8;
  const int32_t begin = unit * w.unit_rows, end = begin + w.unit_rows;
  for (int32_t r = begin; r < end; r += kAhead) {
    Channels<T> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = Load<T>(w.source, sequence, head, min(r + i, end - 1), channel);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (r + i < end) visit(ahead[i]);
    }
  }
}

template <typename T>
__device__ void WriteMinMax(const SummarizeBatch& w, int sequence, int head, int32_t unit,
                            int channel) {
  // The first of equals stays (-0 and 0 differ in bits), and a NaN only where it comes first.
  Channels<T> low = Load<T>(w.source, sequence, head, unit * w.unit_rows, channel), high = low;
  ForEachRow<T>(w, sequence, head, unit, channel, [&](const Channels<T>& x) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
      if (FloatOf(x.at[c]) < FloatOf(low.at[c])) low.at[c] = x.at[c];
      if (FloatOf(x.at[c]) > FloatOf(high.at[c])) high.at[c] = x.at[c];
    }
  });
  char* out = RowOf(w.summary, sequence, head, unit) + channel * sizeof(T);
  *reinterpret_cast<Channels<T>*>(out) = low;
  *reinterpret_cast<Channels<T>*>(out + w.field_stride) = high;
}

template <typename T>
__device__ void WriteMean(const SummarizeBatch& w, int sequence, int head, int32_t unit,
                          int channel) {
  float sum[kLane] = {};
  ForEachRow<T>(w, sequence, head, unit, channel, [&](const Channels<T>& x) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) sum[c] += FloatOf(x.at[c]);
  });
  const auto count = static_cast<float>(w.unit_rows);
  char* out = RowOf(w.summary, sequence, head, unit);
  if (w.summary.dtype == DType::kF32) {
    for (int c = 0; c < kLane; ++c) {
      reinterpret_cast<float*>(out)[channel + c] = __fdiv_rn(sum[c], count);
    }
    return;
  }
  Channels<__nv_bfloat16> mean;
  for (int c = 0; c < kLane; ++c) mean.at[c] = Rounded<__nv_bfloat16>(__fdiv_rn(sum[c], count));
  reinterpret_cast<Channels<__nv_bfloat16>*>(out)[channel / kLane] = mean;
}

template <typename T>
__device__ void WriteDeviation(const SummarizeBatch& w, int sequence, int head, int32_t unit,
                               int channel) {
  float mean[kLane] = {}, squares[kLane] = {};
  ForEachRow<T>(w, sequence, head, unit, channel, [&](const Channels<T>& x) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) mean[c] += FloatOf(x.at[c]);
  });
  const auto count = static_cast<float>(w.unit_rows);
#pragma unroll
  for (int c = 0; c < kLane; ++c) mean[c] = __fdiv_rn(mean[c], count);
  ForEachRow<T>(w, sequence, head, unit, channel, [&](const Channels<T>& x) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
      const float from_mean = FloatOf(x.at[c]) - mean[c];
      squares[c] = __fadd_rn(squares[c], __fmul_rn(from_mean, from_mean));
    }
  });
  Channels<T> means, variances;
#pragma unroll
  for (int c = 0; c < kLane; ++c) {
    float variance = __fdiv_rn(squares[c], count);
    if (std::is_same_v<T, __half> && variance > kMostHalfVariance) variance = kMostHalfVariance;
    means.at[c] = Rounded<T>(mean[c]);
    variances.at[c] = Rounded<T>(variance);
  }
  char* out = RowOf(w.summary, sequence, head, unit) + channel * sizeof(T);
  *reinterpret_cast<Channels<T>*>(out) = means;
  *reinterpret_cast<Channels<T>*>(out + w.field_stride) = variances;
}

// Grid (units * channels / 1024, kv_heads, batch * layers): a thread has 8 channels of a unit.
template <typename T>
__global__ __launch_bounds__(kThreads, 5) void SummarizeKernel(SummarizeBatch w) {
  const int head = blockIdx.y, layer = blockIdx.z / w.batch, sequence = blockIdx.z % w.batch;
  w.source.offset += layer * w.source_layer_stride;
  w.summary.offset += layer * w.summary_layer_stride;
  const int lanes = w.source.head_dim / kLane;
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int32_t unit_tokens = w.unit_rows * w.row_tokens;
  const int32_t unit = w.from[sequence] / unit_tokens + index / lanes;
  if (unit >= w.to[sequence] / unit_tokens || index / lanes >= w.units_max) return;
  const int channel = index % lanes * kLane;
  if constexpr (sizeof(T) == 2) {  // the only rows that others than means are made of
    if (w.kind == SummarizeBatch::Kind::kMinMax) {
      return WriteMinMax<T>(w, sequence, head, unit, channel);
    }
    if (w.kind == SummarizeBatch::Kind::kDeviation) {
      return WriteDeviation<T>(w, sequence, head, unit, channel);
    }
  }
  WriteMean<T>(w, sequence, head, unit, channel);
}

template <typename T>
int Launch(const SummarizeBatch& w, Stream stream) {
  const int threads = w.units_max * (w.source.head_dim / kLane);
  const dim3 grid((threads + kThreads - 1) / kThreads, w.source.kv_heads, w.batch * w.layers);
  SummarizeKernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(w);
  return cudaGetLastError();
}

}  // namespace

int SummarizeCuda(const SummarizeBatch& w, Stream stream) {
  if (w.batch == 0 || w.units_max == 0) return cudaSuccess;
  const bool mean = w.kind == SummarizeBatch::Kind::kMean;
  const bool fits = mean ? w.summary.dtype != DType::kF16 : w.summary.dtype == w.source.dtype;
  if (w.layers < 1 || int64_t{w.batch} * w.layers > 65535) return cudaErrorInvalidValue;
  if (!fits || w.unit_rows < 1 || w.row_tokens < 1 || w.source.head_dim % kLane != 0)
    return cudaErrorInvalidValue;
  switch (w.source.dtype) {
    case DType::kBF16:
      return Launch<__nv_bfloat16>(w, stream);
    case DType::kF16:
      return Launch<__half>(w, stream);
    case DType::kF32:
      return mean ? Launch<float>(w, stream) : cudaErrorInvalidValue;
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvstrata::cuda
