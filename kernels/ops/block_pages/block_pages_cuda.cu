// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/block_pages/block_pages_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEntries = 4;  // that a thread writes

__device__ void WriteLengths(const BlockPagesBatch& w, int row, int32_t tokens) {
  const bool there = row < w.rows;
  const bool full = there && w.in_full != nullptr && w.in_full[row] != 0;
  const int32_t added = !there                      ? 0
                        : w.query_starts == nullptr ? tokens
                                                    : w.query_starts[row + 1] - w.query_starts[row];
  w.lengths[row] = tokens;
  w.chosen[row] = full ? 0 : tokens;
  w.from[row] = max(tokens - added, 0);
  w.to[row] = tokens;
  if (w.sink_end == nullptr) return;
  const Candidates left_out = CandidatesOf(w.window, w.chosen[row]);
  w.sink_end[row] = left_out.full ? 0 : left_out.first;
  w.recent_begin[row] = left_out.full ? 0 : left_out.last;
}

// Grid (page_stride / entries of a CTA, capacity).
__global__ __launch_bounds__(kThreads) void BlockPagesKernel(const BlockPagesBatch w) {
  const int row = blockIdx.y;
  const int32_t most = w.page_stride * w.block_tokens;
  const int32_t tokens = row >= w.rows ? 0 : w.tokens == nullptr ? most : min(w.tokens[row], most);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    WriteLengths(w, row, tokens);
    if (row == 0 && w.sampled_row != nullptr) *w.sampled_row = w.sampled;
  }
  const int32_t blocks = max((tokens + w.block_tokens - 1) / w.block_tokens, 1);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int32_t at = (static_cast<int32_t>(blockIdx.x) * kEntries + i) * kThreads +
                       static_cast<int32_t>(threadIdx.x);
    if (at >= blocks) return;
    const int32_t block = tokens == 0 ? 0 : w.blocks[row * w.blocks_of_row + at];
    w.pages[int64_t{row} * w.page_stride + at] = static_cast<uint64_t>(block * w.block_stride);
  }
}

}  // namespace

int BlockPagesCuda(const BlockPagesBatch& w, Stream stream) {
  if (w.rows < 0 || w.rows > w.capacity || w.capacity > 65535 || w.page_stride < 1 ||
      w.block_tokens < 1 || (w.sink_end == nullptr) != (w.recent_begin == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (w.capacity == 0) return cudaSuccess;
  constexpr int kOfCta = kThreads * kEntries;
  const dim3 grid((w.page_stride + kOfCta - 1) / kOfCta, w.capacity);
  BlockPagesKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(w);
  return cudaGetLastError();
}

}  // namespace kvstrata::cuda
