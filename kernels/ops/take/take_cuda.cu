// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/ops/take/take.h"
#include "kernels/ops/take/take_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kTakeWarps = kThreads / 32;
constexpr int kBinsOfThread = kTakeBins / kThreads;

__device__ double Middle(int bin) {
  const auto first = static_cast<uint32_t>(bin) << kTakeShift;
  return static_cast<double>(__uint_as_float(first | 1u << (kTakeShift - 1)));
}

__device__ void CountVotes(const float* votes, int n, int32_t* counts) {
#pragma unroll 8
  for (int i = threadIdx.x; i < n; i += kThreads) {
    atomicAdd(&counts[(__float_as_uint(votes[i]) & 0x7FFFFFFFu) >> kTakeShift], 1);
  }
}

// The sum of the votes in the bins below this thread's, and up to its last; how many lie below.
struct Sums {
  double below, upto;
  int32_t count;
};

// All threads call it. One thread's `upto` is the next one's `below`, to the bit.
__device__ Sums SumBins(double sum, int32_t count) {
  __shared__ double sums[kTakeWarps];
  __shared__ int32_t counts[kTakeWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double upto = sum;
  for (int step = 1; step < 32; step *= 2) {
    const double more = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += more;
  }
  const int32_t inclusive = WarpInclusiveSum(count);
  if (lane == 31) sums[warp] = upto, counts[warp] = inclusive;
  const double of_lane_before = __shfl_up_sync(~0u, upto, 1);
  __syncthreads();
  double warps = 0;
  int32_t before = inclusive - count;
  for (int i = 0; i < warp; ++i) warps += sums[i], before += counts[i];
  return {lane == 0 ? warps : warps + of_lane_before, warps + upto, before};
}

// How many votes are taken, where sums of `room` may still go and the thread's bins hold the first
// that does not fit; `taken` of them are not below.
__device__ int32_t TakenFrom(const int32_t* bins, int first, double room, int32_t taken) {
  for (int i = 0; i < kBinsOfThread && taken > 0; ++i) {
    const double middle = Middle(first + i), most = floor(room / middle);
    if (!(most >= bins[i])) return taken - (most > 0 ? static_cast<int32_t>(most) : 0);
    taken -= bins[i];
    room -= bins[i] * middle;
  }
  return taken;
}

// Grid (groups, batch).
__global__ __launch_bounds__(kThreads) void TakeKernel(const __grid_constant__ TakeBatch w) {
  __shared__ int32_t counts[kTakeBins];
  __shared__ int32_t found;
  for (int i = threadIdx.x; i < kTakeBins; i += kThreads) counts[i] = 0;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  WaitForPrevious();
  LetNextStart();
  const int64_t list = int64_t{blockIdx.y} * w.groups + blockIdx.x;
  const Candidates units = CandidatesOf(w.rule, w.tokens[blockIdx.y]);
  if (units.full) {
    if (threadIdx.x == 0) w.takes[list] = 0;
    return;
  }
  CountVotes(w.votes + list * w.vote_stride, units.count(), counts);
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) * kBinsOfThread;
  double sum = 0;
  int32_t count = 0;
  for (int i = 0; i < kBinsOfThread; ++i) {
    const int32_t of_bin = counts[first + i];
    if (of_bin > 0) sum += of_bin * Middle(first + i);
    count += of_bin;
  }
  const Sums sums = SumBins(sum, count);
  if (sums.below <= w.missed && !(sums.upto <= w.missed)) {
    atomicMax(&found,
              TakenFrom(counts + first, first, w.missed - sums.below, units.count() - sums.count));
  }
  __syncthreads();
  if (threadIdx.x == 0) w.takes[list] = min(found, w.most);
}

}  // namespace

int TakeCuda(const TakeBatch& w, Stream stream) {
  if (w.batch == 0) return cudaSuccess;
  if (w.groups < 1 || w.vote_stride < 1 || w.most < 0 || w.takes == nullptr) {
    return cudaErrorInvalidValue;
  }
  return LaunchDependent(TakeKernel, dim3(w.groups, w.batch), kThreads, 0, stream, w);
}

}  // namespace kvstrata::cuda
