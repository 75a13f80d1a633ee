// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/block_slots/block_slots_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void BlockSlotsKernel(const BlockSlotsBatch w) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= w.capacity) return;
  if (row == 0 && w.step != nullptr) ++*w.step;
  const int32_t slot = row < w.rows ? w.slot_ids[row] : -1;
  const int32_t tokens = slot < 0 ? 0 : w.lengths[row];
  const bool decodes = tokens > 0 && row<w.decodes, is_prompt = tokens> 0 && !decodes;
  const int32_t groups = decodes ? (tokens - 1) / w.unit : 0;
  const int32_t raw = decodes ? tokens - groups * w.unit : 0;
  const bool in_full = tokens < w.min_tokens || (w.in_full != nullptr && w.in_full[row] != 0);
  w.slots[row] = static_cast<uint64_t>(max(slot, 0) * w.slot_bytes);
  w.seal_blocks[row] = w.pages[int64_t{row} * w.page_stride + groups];
  w.tokens[row] = decodes && !in_full ? tokens : 0;
  w.raw[row] = raw;
  w.groups[row] = groups;
  w.seal_from[row] = max(raw - 1, 0);
  w.seal_to[row] = raw;
  w.tails[2 * row] = 0;
  w.tails[2 * row + 1] = is_prompt ? tokens % w.unit : 0;
}

}  // namespace

int BlockSlotsCuda(const BlockSlotsBatch& w, Stream stream) {
  if (w.decodes < 0 || w.decodes > w.rows || w.rows > w.capacity || w.unit < 1) {
    return cudaErrorInvalidValue;
  }
  if (w.capacity == 0) return cudaSuccess;
  const dim3 grid((w.capacity + kThreads - 1) / kThreads);
  BlockSlotsKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(w);
  return cudaGetLastError();
}

}  // namespace kvstrata::cuda
