// SPDX-License-Identifier: Apache-2.0
// A CTA a matrix. A sweep is a round-robin tournament (as in jacobi-inl.h, but nobody moves: who
// meets whom follows from the round's number). In a round all pairs' angles are taken first; then
// each thread rotates, for its two pairs of columns, some pairs of rows of A from both sides and
// some rows of V from the right. Neighbouring lanes have neighbouring columns: no bank conflicts.
//
// Predicted for 512 matrices of 128 x 128 on an H100 (four a SM, one after the other): a round
// reads and writes A and V once, 2048 wavefronts of shared memory, and issues about as much; with
// two barriers and an angle 2500 cycles; 127 rounds, 8 sweeps: 1.5 ms a matrix, 6 ms in all.
// Measured: 8.3.
#include <cstdint>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/eigen/eigen_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSweepsMax = 20;     // NaNs must end too
constexpr float kDone = 0x1p-30f;  // as kJacobiDone, for fp32
constexpr uint32_t kSign = 1u << 31;

// Rows are odd numbers of floats apart: columns are read without conflicts too.
template <int kDim>
struct MatrixShape {
  static constexpr int kStride = kDim + 1, kFloats = kDim * kStride, kPairs = kDim / 2;
  static constexpr bool kShared = kDim <= 128;
};

template <int kDim>
struct Shared {
  float2 angles[kDim / 2];    // cosine, sine
  float2 diagonal[kDim / 2];  // the rotated pairs' entries, afterwards
  int order[kDim];            // by descending value
  uint32_t largest;           // magnitude in the matrix, as bits
};

struct Pair {
  int p, q;
};

// Everybody meets everybody in kDim - 1 rounds.
template <int kDim>
__device__ __forceinline__ Pair PairOf(int round, int k) {
  constexpr int kMoving = kDim - 1;
  if (k == 0) return {kMoving, round};
  const int p = round + k, q = round - k;
  return {p >= kMoving ? p - kMoving : p, q < 0 ? q + kMoving : q};
}

// What makes element pq zero; the identity if it is small enough.
template <int kDim>
__device__ __forceinline__ bool TakeAngle(const float* a, int round, int k, float done,
                                          Shared<kDim>& shared) {
  constexpr int kStride = MatrixShape<kDim>::kStride;
  const Pair at = PairOf<kDim>(round, k);
  const float pp = a[at.p * kStride + at.p], qq = a[at.q * kStride + at.q];
  const float pq = a[at.p * kStride + at.q];
  if (!(fabsf(pq) > done)) {
    shared.angles[k] = {1, 0};
    shared.diagonal[k] = {pp, qq};
    return false;
  }
  const float theta = (qq - pp) / (2 * pq);
  const float t = copysignf(1.0f, theta) / (fabsf(theta) + sqrtf(1 + theta * theta));
  const float c = 1 / sqrtf(1 + t * t);
  shared.angles[k] = {c, t * c};
  shared.diagonal[k] = {pp - t * pq, qq + t * pq};
  return true;
}

__device__ __forceinline__ void ApplyRotation(float2 angle, float& x, float& y) {
  const float old = x;
  x = angle.x * old - angle.y * y;
  y = angle.y * old + angle.x * y;
}

// All rows of V in the columns of a pair. Everything is read before the first write: the compiler
// cannot know that rows do not overlap.
template <int kDim>
__device__ __forceinline__ void RotateVectors(float* v, const Pair& column, float2 angle) {
  constexpr int kStride = MatrixShape<kDim>::kStride, kEach = kDim / kWarps;
  float* row = v + threadIdx.x / 32 * kStride;
  float x[kEach], y[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    x[i] = row[i * kWarps * kStride + column.p];
    y[i] = row[i * kWarps * kStride + column.q];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    ApplyRotation(angle, x[i], y[i]);
    row[i * kWarps * kStride + column.p] = x[i];
    row[i * kWarps * kStride + column.q] = y[i];
  }
}

// All pairs of rows of A in the columns of pair `l`, from both sides. Reads first, as above.
template <int kDim>
__device__ __forceinline__ void RotateMatrix(float* a, int round, int l, const Pair& column,
                                             float2 angle, const Shared<kDim>& shared) {
  constexpr int kStride = MatrixShape<kDim>::kStride, kEach = MatrixShape<kDim>::kPairs / kWarps;
  const int warp = threadIdx.x / 32;
  float pp[kEach], pq[kEach], qp[kEach], qq[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const Pair row = PairOf<kDim>(round, warp + i * kWarps);
    pp[i] = a[row.p * kStride + column.p], pq[i] = a[row.p * kStride + column.q];
    qp[i] = a[row.q * kStride + column.p], qq[i] = a[row.q * kStride + column.q];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int k = warp + i * kWarps;
    const float2 rows = shared.angles[k];
    ApplyRotation(rows, pp[i], qp[i]);
    ApplyRotation(rows, pq[i], qq[i]);
    ApplyRotation(angle, pp[i], pq[i]);
    ApplyRotation(angle, qp[i], qq[i]);
    if (k == l && angle.y != 0) {
      pp[i] = shared.diagonal[k].x;
      qq[i] = shared.diagonal[k].y;
      pq[i] = qp[i] = 0;
    }
    const Pair row = PairOf<kDim>(round, k);
    a[row.p * kStride + column.p] = pp[i], a[row.p * kStride + column.q] = pq[i];
    a[row.q * kStride + column.p] = qp[i], a[row.q * kStride + column.q] = qq[i];
  }
}

// Whether any pair was rotated.
template <int kDim>
__device__ __forceinline__ bool Round(float* a, float* v, int round, float done,
                                      Shared<kDim>& shared) {
  constexpr int kPairs = MatrixShape<kDim>::kPairs;
  const int own = static_cast<int>(threadIdx.x);
  const bool rotates = own < kPairs && TakeAngle<kDim>(a, round, own, done, shared);
  if (!__syncthreads_or(rotates)) return false;
#pragma unroll 1
  for (int l = own % 32; l < kPairs; l += 32) {
    const Pair column = PairOf<kDim>(round, l);
    const float2 angle = shared.angles[l];
    RotateMatrix<kDim>(a, round, l, column, angle, shared);
    RotateVectors<kDim>(v, column, angle);
  }
  __syncthreads();
  return true;
}

// V is the identity, A the matrix.
template <int kDim>
__device__ __forceinline__ void Load(const double* from, float* a, float* v, Shared<kDim>& shared) {
  constexpr int kStride = MatrixShape<kDim>::kStride;
  if (threadIdx.x == 0) shared.largest = 0;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < kDim * kDim; i += kThreads) {
    const int row = i / kDim, column = i % kDim;
    const auto x = static_cast<float>(from[i]);
    a[row * kStride + column] = x;
    v[row * kStride + column] = row == column ? 1.0f : 0.0f;
    largest = max(largest, __float_as_uint(x) & ~kSign);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&shared.largest, largest);
  __syncthreads();
}

// Values of the diagonal, and whose is which in descending order. NaNs are last.
template <int kDim>
__device__ __forceinline__ void Sort(const float* a, float* values, Shared<kDim>& shared) {
  constexpr int kStride = MatrixShape<kDim>::kStride;
  const auto key = [&](int i) {
    const float x = a[i * kStride + i];
    return isnan(x) ? -INFINITY : x;
  };
  const int own = static_cast<int>(threadIdx.x);
  if (own < kDim) {
    const float mine = key(own);
    int before = 0;
    for (int i = 0; i < kDim; ++i) {
      const float other = key(i);
      before += other > mine || (other == mine && i < own);
    }
    shared.order[before] = own;
    values[before] = a[own * kStride + own];
  }
  __syncthreads();
}

// A warp a row of the result: a column of V, of norm 1, its largest component positive.
template <int kDim>
__device__ __forceinline__ void Write(const float* v, float* vectors, const Shared<kDim>& shared) {
  constexpr int kStride = MatrixShape<kDim>::kStride, kEach = kDim / 32;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kDim; i += kWarps) {
    float x[kEach], norm = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      x[j] = v[(lane + 32 * j) * kStride + shared.order[i]];
      norm += x[j] * x[j];
    }
    for (int step = 16; step > 0; step /= 2) norm += __shfl_xor_sync(~0u, norm, step);
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      x[j] /= sqrtf(norm);
      largest = max(largest, __float_as_uint(x[j]) & ~kSign);
    }
    largest = __reduce_max_sync(~0u, largest);
    uint32_t first = 2 * kDim;  // twice the channel that is the largest, and whether it is negative
#pragma unroll
    for (int j = kEach - 1; j >= 0; --j) {
      const uint32_t bits = __float_as_uint(x[j]);
      if ((bits & ~kSign) == largest) first = 2 * (lane + 32 * j) + (bits >> 31);
    }
    first = __reduce_min_sync(~0u, first);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      vectors[i * kDim + lane + 32 * j] = first % 2 != 0 ? -x[j] : x[j];
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) EigenKernel(const __grid_constant__ EigenBatch w) {
  extern __shared__ float dynamic[];
  __shared__ Shared<kDim> shared;
  using Shape = MatrixShape<kDim>;
  WaitForPrevious();
  LetNextStart();
  const EigenItem item = w.items[blockIdx.x];
  float* a = Shape::kShared ? dynamic : w.workspace + int64_t{blockIdx.x} * 2 * Shape::kFloats;
  float* v = a + Shape::kFloats;
  Load<kDim>(reinterpret_cast<const double*>(item.a), a, v, shared);
  const float done = kDone * __uint_as_float(shared.largest);
#pragma unroll 1
  for (int sweep = 0; sweep < kSweepsMax; ++sweep) {
    bool rotated = false;
#pragma unroll 1
    for (int round = 0; round < kDim - 1; ++round) {
      rotated |= Round<kDim>(a, v, round, done, shared);
    }
    if (!rotated) break;
  }
  Sort<kDim>(a, reinterpret_cast<float*>(item.values), shared);
  Write<kDim>(v, reinterpret_cast<float*>(item.vectors), shared);
}

template <int kDim>
int Launch(const EigenBatch& w, Stream stream) {
  using Shape = MatrixShape<kDim>;
  const int bytes = Shape::kShared ? 2 * Shape::kFloats * static_cast<int>(sizeof(float)) : 0;
  if (const int error = AllowShared(EigenKernel<kDim>, bytes); error != 0) return error;
  return LaunchDependent(EigenKernel<kDim>, dim3(w.count), kThreads, bytes, stream, w);
}

}  // namespace

int64_t EigenWorkspaceBytes(const EigenBatch& w) {
  if (w.dim != 256) return 0;
  return int64_t{w.count} * 2 * MatrixShape<256>::kFloats * int64_t{sizeof(float)};
}

int EigenCuda(const EigenBatch& w, Stream stream) {
  if (w.count < 0) return cudaErrorInvalidValue;
  if (w.count == 0) return cudaSuccess;
  return w.dim == 64    ? Launch<64>(w, stream)
         : w.dim == 128 ? Launch<128>(w, stream)
         : w.dim == 256 ? Launch<256>(w, stream)
                        : int{cudaErrorInvalidValue};
}

}  // namespace kvstrata::cuda
