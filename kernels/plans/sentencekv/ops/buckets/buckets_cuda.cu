// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/row_scores.cuh"
#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/plans/sentencekv/ops/buckets/buckets_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kRowThreads = 1024;
constexpr int kMeanWarps = 8;

// The sentence that holds a token: the first that ends behind it.
__device__ int32_t SentenceOf(const int32_t* ends, int32_t sentences, int32_t token) {
  int32_t low = 0, high = sentences;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (ends[middle] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// How many of the threads before this one say yes; *total: of all.
__device__ int32_t CountBefore(bool yes, int32_t* total) {
  __shared__ int32_t warps[kRowThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t votes = __ballot_sync(~0u, yes);
  __syncthreads();  // the counts of the last round are read
  if (lane == 0) warps[warp] = __popc(votes);
  __syncthreads();
  const int32_t upto = WarpInclusiveSum(warps[lane]);
  const int32_t before = warp == 0 ? 0 : __shfl_sync(~0u, upto, warp - 1);
  *total = __shfl_sync(~0u, upto, 31);
  return before + __popc(votes & ((1u << lane) - 1));
}

// A CTA a row: completes its kept tokens and cuts them into buckets.
__global__ __launch_bounds__(kRowThreads) void CutKernel(PromptBucketsBatch w) {
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  int32_t* const kept = w.table.kept + row * w.table.kept_stride;
  int32_t* const firsts = w.table.firsts + row * (w.table.bucket_stride + 1);
  const int32_t count = w.ranked + max(w.window.end - w.window.begin, 0);
  for (int32_t i = threadIdx.x; i < count; i += kRowThreads) {
    if (i >= w.ranked) kept[i] = w.window.begin + i - w.ranked;
    if (i < w.ranked && w.all) kept[i] = w.first + i;
  }
  __syncthreads();
  int32_t buckets = 0;
  for (int32_t from = 0; from < count; from += kRowThreads) {
    const int32_t i = from + static_cast<int32_t>(threadIdx.x);
    bool begins = i == 0;
    if (i > 0 && i < count) {
      begins =
          SentenceOf(w.ends, w.sentences, kept[i]) != SentenceOf(w.ends, w.sentences, kept[i - 1]);
    }
    int32_t total = 0;
    const int32_t before = CountBefore(begins && i < count, &total);
    if (begins && i < count) firsts[buckets + before] = i;
    buckets += total;
  }
  if (threadIdx.x != 0) return;
  firsts[buckets] = count;
  w.table.counts[row] = buckets;
}

// Keys of one row of a sequence.
template <typename T, int kDim>
class RowKeys {
 public:
  static constexpr int kOwn = kDim / 32;  // channels of a lane: lane, lane + 32, ...

  __device__ RowKeys(const DeviceRows& keys, int64_t layer_stride, int64_t row)
      : keys_(keys),
        head_(keys.offset + row / keys.kv_heads * layer_stride +
              row % keys.kv_heads * keys.head_stride) {}
  __device__ void Add(int32_t token, float (&sum)[kOwn]) const {
    const auto* key = reinterpret_cast<const T*>(RowAddress(keys_, keys_.pages, head_, token));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] += FloatOf(key[threadIdx.x % 32 + 32 * i]);
  }
  __device__ static void WriteMean(const float (&sum)[kOwn], int32_t count, BF16* mean) {
    auto* const to = reinterpret_cast<__nv_bfloat16*>(mean);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      to[threadIdx.x % 32 + 32 * i] =
          Rounded<__nv_bfloat16>(__fdiv_rn(sum[i], static_cast<float>(count)));
    }
  }

 private:
  const DeviceRows& keys_;
  const int64_t head_;
};

// Grid (buckets / kMeanWarps, rows).
template <typename T, int kDim>
__global__ __launch_bounds__(kMeanWarps * 32) void MeanKernel(PromptBucketsBatch w) {
  WaitForPrevious();
  const int64_t row = blockIdx.y;
  const auto bucket = static_cast<int32_t>(blockIdx.x * kMeanWarps + threadIdx.x / 32);
  if (bucket >= w.table.counts[row]) return;
  const int32_t* const kept = w.table.kept + row * w.table.kept_stride;
  const int32_t* const firsts = w.table.firsts + row * (w.table.bucket_stride + 1) + bucket;
  const RowKeys<T, kDim> keys(w.keys, w.key_layer_stride, row);
  float sum[RowKeys<T, kDim>::kOwn] = {};
  for (int32_t i = firsts[0]; i < firsts[1]; ++i) keys.Add(kept[i], sum);
  keys.WriteMean(sum, firsts[1] - firsts[0],
                 w.table.means + (row * w.table.bucket_stride + bucket) * kDim);
}

// Grid (sentences, rows / kMeanWarps).
template <typename T, int kDim>
__global__ __launch_bounds__(kMeanWarps *
                             32) void WholeKernel(const __grid_constant__ WholeBucketsBatch w) {
  WaitForPrevious();
  const int64_t row = int64_t{blockIdx.y} * kMeanWarps + threadIdx.x / 32;
  const int64_t rows = int64_t{w.layers} * w.keys.kv_heads;
  if (row >= rows) return;
  const Run sentence = w.sentences[blockIdx.x];
  const int64_t bucket = w.first + blockIdx.x;
  if (row == 0 && threadIdx.x == 0) {
    w.table.whole[2 * bucket] = sentence.begin;
    w.table.whole[2 * bucket + 1] = sentence.end;
  }
  const RowKeys<T, kDim> keys(w.keys, w.key_layer_stride, row);
  float sum[RowKeys<T, kDim>::kOwn] = {};
  for (int32_t t = sentence.begin; t < sentence.end; ++t) keys.Add(t, sum);
  keys.WriteMean(sum, sentence.end - sentence.begin,
                 w.table.whole_means + (bucket * rows + row) * kDim);
}

}  // namespace

int PromptBucketsCuda(const PromptBucketsBatch& w, Stream stream) {
  const int32_t rows = w.layers * w.keys.kv_heads;
  if (rows < 1 || rows > 65535 || w.sentences < 1) return cudaErrorInvalidValue;
  const int cut = LaunchDependent(CutKernel, dim3(rows), kRowThreads, 0, stream, w);
  if (cut != cudaSuccess || w.table.bucket_stride == 0) return cut;
  const dim3 grid((w.table.bucket_stride + kMeanWarps - 1) / kMeanWarps, rows);
  return ForRows(w.keys.dtype, w.keys.head_dim, [&]<typename T, int kDim>() {
    return LaunchDependent(MeanKernel<T, kDim>, grid, kMeanWarps * 32, 0, stream, w);
  });
}

int WholeBucketsCuda(const WholeBucketsBatch& w, Stream stream) {
  const int32_t rows = w.layers * w.keys.kv_heads;
  if (rows < 1 || w.count < 0 || w.count > WholeBucketsBatch::kMost) return cudaErrorInvalidValue;
  if (w.count == 0) return cudaSuccess;
  const dim3 grid(w.count, (rows + kMeanWarps - 1) / kMeanWarps);
  return ForRows(w.keys.dtype, w.keys.head_dim, [&]<typename T, int kDim>() {
    return LaunchDependent(WholeKernel<T, kDim>, grid, kMeanWarps * 32, 0, stream, w);
  });
}

}  // namespace kvstrata::cuda
