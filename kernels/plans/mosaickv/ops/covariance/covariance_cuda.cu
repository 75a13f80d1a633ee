// SPDX-License-Identifier: Apache-2.0
// A CTA sums kCovarianceRows rows of an item in tensor cores: a stage of rows in shared memory is
// read transposed, and the same registers are left and right factor. Only blocks of 16 x 16 on and
// above the diagonal are made: rows of blocks i and kBlocks - 1 - i together have kBlocks + 1 of
// them, a warp's share; further warps take other rows of the stage. The last CTA of an item adds
// the sums up in fp64.
//
// Floor and prediction on an H100: 64K rows of 512 heads x 128 in bf16 are 8.6 GB, 2.8 ms at 3.1
// TB/s; 1.2 ms of tensor cores and 1.4 ms of shared memory beside it. Predicted 3.3 ms; measured
// 3.96.
#include <algorithm>

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"
#include "kernels/plans/mosaickv/ops/covariance/covariance_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStages = 4, kStageBytes = 16384;
constexpr int kBlockFloats = 256;

template <int kDim>
struct Shape {
  static constexpr int kBlocks = kDim / 16;         // a side
  static constexpr int kSlots = kBlocks + 1;        // blocks of a warp
  static constexpr int kShares = kBlocks / 2;       // warps that make all blocks
  static constexpr int kGroups = kWarps / kShares;  // groups of warps, each with rows of its own
  static constexpr int kChunks = kDim / 8;          // pieces of 16 bytes in a row
  static constexpr int kRows = kStageBytes / kDim / 2;                          // rows of a stage
  static constexpr int64_t kFloats = int64_t{kShares} * kSlots * kBlockFloats;  // floats of a CTA
};

struct Block {
  int row, column;
  bool first;  // in the first of a share's two rows of blocks
};

// The blocks of a share: what is on and right of the diagonal in row i, then in row kBlocks-1-i.
template <int kDim>
__device__ __forceinline__ Block BlockOf(int share, int slot) {
  constexpr int kBlocks = Shape<kDim>::kBlocks;
  const bool first = slot < kBlocks - share;
  const int row = first ? share : kBlocks - 1 - share;
  return {row, first ? share + slot : slot - 1, first};
}

// Neighbouring rows begin in other banks.
template <int kDim>
__device__ __forceinline__ uint32_t ChunkAt(int row, int chunk) {
  return static_cast<uint32_t>(row * Shape<kDim>::kChunks + (chunk ^ (row & 7))) * 16;
}

// Channels [16 block, 16 block + 16) of rows [row, row + 16): element (channel, row) of the left
// factor's fragment.
template <int kDim>
__device__ __forceinline__ void LoadTransposed(uint32_t stage, int row, int block,
                                               uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t at =
      stage + ChunkAt<kDim>(row + lane % 8 + lane / 16 * 8, 2 * block + lane / 8 % 2);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}

// Stages of rows on their way from memory; what lies behind the last row is zeros.
template <int kDim>
class RowStages {
 public:
  __device__ RowStages(const CovarianceBatch& w, const HeadRows& rows, int32_t begin, int32_t end,
                       uint32_t shared)
      : pages_(reinterpret_cast<const uint64_t*>(rows.pages)),
        offset_(rows.offset),
        slot_stride_(w.shape.slot_stride),
        next_(begin),
        end_(end),
        shared_(shared) {
    page_shift_ = 31 - __clz(w.shape.page_tokens);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) Issue();
  }
  // Waits for the oldest stage and starts another copy; the address of the stage.
  __device__ __forceinline__ uint32_t Next() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    Issue();
    const uint32_t at = shared_ + read_ * kStageBytes;
    read_ = read_ + 1 == kStages ? 0 : read_ + 1;
    return at;
  }

 private:
  using S = Shape<kDim>;

  __device__ __forceinline__ void Issue() {
    const uint32_t to = shared_ + written_ * kStageBytes;
#pragma unroll
    for (int i = 0; i < S::kRows * S::kChunks / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = at / S::kChunks, chunk = at % S::kChunks;
      const int32_t t = next_ + row;
      auto from = reinterpret_cast<uint64_t>(pages_);  // not read where there is no row
      if (t < end_) {
        const int32_t slot = t & ((1 << page_shift_) - 1);
        from = pages_[t >> page_shift_] + offset_ + slot * slot_stride_ + chunk * 16;
      }
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       to + ChunkAt<kDim>(row, chunk)),
                   "l"(from), "r"(t < end_ ? 16 : 0)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    next_ = min(next_ + S::kRows, end_);
    written_ = written_ + 1 == kStages ? 0 : written_ + 1;
  }

  const uint64_t* pages_;
  const int64_t offset_, slot_stride_;
  int page_shift_;
  int32_t next_;
  const int32_t end_;
  const uint32_t shared_;
  int written_ = 0, read_ = 0;
};

// sums[slot] += the products of 16 rows.
template <typename T, int kDim>
__device__ __forceinline__ void AddRows(uint32_t stage, int row, int share,
                                        float (&sums)[Shape<kDim>::kSlots][2][4]) {
  uint32_t a[2][4];
  LoadTransposed<kDim>(stage, row, share, a[0]);
  LoadTransposed<kDim>(stage, row, Shape<kDim>::kBlocks - 1 - share, a[1]);
#pragma unroll
  for (int slot = 0; slot < Shape<kDim>::kSlots; ++slot) {
    const Block block = BlockOf<kDim>(share, slot);
    uint32_t b[4], c[4];
    LoadTransposed<kDim>(stage, row, block.column, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = block.first ? a[0][i] : a[1][i];
    MmaM16N8K16<T>(sums[slot][0], c[0], c[1], c[2], c[3], b[0], b[2]);
    MmaM16N8K16<T>(sums[slot][1], c[0], c[1], c[2], c[3], b[1], b[3]);
  }
}

// The groups' sums as one, in those of the first. Through shared memory that stages used.
template <int kDim>
__device__ __forceinline__ void SumGroups(float* scratch,
                                          float (&sums)[Shape<kDim>::kSlots][2][4]) {
  using S = Shape<kDim>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = warp % S::kShares, group = warp / S::kShares;
  const auto for_each = [&](int of_group, auto visit) {
    float* at = scratch + ((of_group - 1) * S::kShares + share) * S::kSlots * kBlockFloats + lane;
#pragma unroll
    for (int i = 0; i < S::kSlots * 8; ++i) visit(at[i * 32], sums[i / 8][i / 4 % 2][i % 4]);
  };
  __syncthreads();
  if (group > 0) for_each(group, [](float& at, float sum) { at = sum; });
  __syncthreads();
  if (group > 0) return;
  for (int i = 1; i < S::kGroups; ++i) for_each(i, [](float at, float& sum) { sum += at; });
}

// All parts' sums to both triangles of `out`.
template <int kDim>
__device__ __forceinline__ void WriteSums(const float* parts, int count, bool accumulate,
                                          double* out) {
  using S = Shape<kDim>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % S::kShares;
#pragma unroll 1
  for (int slot = warp / S::kShares; slot < S::kSlots; slot += S::kGroups) {
    const Block block = BlockOf<kDim>(share, slot);
    const float* from = parts + (share * S::kSlots + slot) * kBlockFloats + lane;
    double sums[8] = {};
    for (int p = 0; p < count; ++p) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += double{__ldcg(from + p * S::kFloats + i * 32)};
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = block.row * 16 + lane / 4 + i / 2 % 2 * 8;
      const int column = block.column * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      double& at = out[row * kDim + column];
      const double sum = accumulate ? at + sums[i] : sums[i];
      at = sum;
      if (block.row != block.column) out[column * kDim + row] = sum;
    }
  }
}

// Grid (parts, items).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 256 ? 1 : 2)
    CovarianceKernel(const __grid_constant__ CovarianceBatch w) {
  extern __shared__ uint4 dynamic[];
  __shared__ bool is_last;
  using S = Shape<kDim>;
  WaitForPrevious();
  LetNextStart();
  const CovarianceItem item = w.items[blockIdx.y];
  const int32_t begin =
      min(item.rows.begin + static_cast<int32_t>(blockIdx.x) * kCovarianceRows, item.rows.end);
  const int32_t end = min(begin + kCovarianceRows, item.rows.end);
  const int32_t parts =
      max((item.rows.end - item.rows.begin + kCovarianceRows - 1) / kCovarianceRows, 1);
  if (static_cast<int32_t>(blockIdx.x) >= parts) return;
  const int warp = threadIdx.x / 32, share = warp % S::kShares, group = warp / S::kShares;

  RowStages<kDim> stages(w, item.rows, begin, end,
                         static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)));
  float sums[S::kSlots][2][4] = {};
#pragma unroll 1
  for (int32_t t = begin; t < end; t += S::kRows) {
    const uint32_t stage = stages.Next();
#pragma unroll 1
    for (int row = group * 16; row < S::kRows; row += S::kGroups * 16) {
      AddRows<T, kDim>(stage, row, share, sums);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  SumGroups<kDim>(reinterpret_cast<float*>(dynamic), sums);
  float* workspace = w.workspace + int64_t{blockIdx.y} * gridDim.x * S::kFloats;
  if (group == 0) {
    float* to = workspace + blockIdx.x * S::kFloats + share * S::kSlots * kBlockFloats;
#pragma unroll
    for (int i = 0; i < S::kSlots * 8; ++i) {
      to[i * 32 + threadIdx.x % 32] = sums[i / 8][i / 4 % 2][i % 4];
    }
  }
  if (!ArrivesLast(w.counters + blockIdx.y, parts, is_last)) return;
  WriteSums<kDim>(workspace, parts, w.accumulate, reinterpret_cast<double*>(item.out));
}

int32_t PartsOf(const CovarianceBatch& w) {
  return std::max((w.rows_max + kCovarianceRows - 1) / kCovarianceRows, 1);
}

}  // namespace

int64_t CovarianceWorkspaceBytes(const CovarianceBatch& w) {
  const int64_t blocks = w.shape.head_dim / 16;
  return int64_t{PartsOf(w)} * w.count * (blocks * (blocks + 1) / 2 * kBlockFloats) *
         int64_t{sizeof(float)};
}

int CovarianceCuda(const CovarianceBatch& w, Stream stream) {
  if (!w.shape.IsValid() || w.count < 0 || w.rows_max < 0) return cudaErrorInvalidValue;
  return ForRows(w.shape.dtype, w.shape.head_dim, [&]<typename T, int kDim>() -> int {
    if (w.count == 0) return cudaSuccess;
    constexpr int kBytes = kStages * kStageBytes;
    const auto kernel = CovarianceKernel<T, kDim>;
    if (const int error = AllowShared(kernel, kBytes); error != 0) return error;
    return LaunchDependent(kernel, dim3(PartsOf(w), w.count), kThreads, kBytes, stream, w);
  });
}

}  // namespace kvstrata::cuda
