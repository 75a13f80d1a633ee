// SPDX-License-Identifier: Apache-2.0
// The newest row of a sequence while it is not on its page yet (AttendRawBatch::new_k): it is
// attended as a part of one row by the CTA that finishes an item, so that no CTA waits for its
// page, and written there by the CTA that has the item's first strip.
#pragma once

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/ops/append/not_finite.cuh"
#include "kernels/ops/attend_raw/warp_attention.cuh"

namespace kvstrata::cuda {

template <typename T>
struct alignas(8) FourChannels {
  T x[4];

  __device__ __forceinline__ float4 floats() const {
    return {FloatOf(x[0]), FloatOf(x[1]), FloatOf(x[2]), FloatOf(x[3])};
  }
  // NotFiniteBits of all four.
  __device__ __forceinline__ uint32_t NotFinite() const {
    const auto* const pairs = reinterpret_cast<const uint32_t*>(x);
    return NotFiniteBits<T>(pairs[0]) | NotFiniteBits<T>(pairs[1]);
  }
};

// Channels 4 * column .. of a new row, as its page will hold them.
template <typename T>
__device__ __forceinline__ FourChannels<T> NewChannels(const DeviceSource& from, int sequence,
                                                       int head, int column) {
  const std::byte* const row = static_cast<const std::byte*>(from.data) +
                               sequence * from.row_stride + head * from.head_stride;
  float4 x;
  if (from.dtype == DType::kF32) {
    x = reinterpret_cast<const float4*>(row)[column];
  } else if (from.dtype == DType::kBF16) {
    x = reinterpret_cast<const FourChannels<__nv_bfloat16>*>(row)[column].floats();
  } else {
    x = reinterpret_cast<const FourChannels<__half>*>(row)[column].floats();
  }
  return {{Rounded<T>(x.x), Rounded<T>(x.y), Rounded<T>(x.z), Rounded<T>(x.w)}};
}

// The scaled scores of the item's new row, to shared.new_score. Barrier afterwards.
template <typename T, int kDim>
__device__ __forceinline__ void ScoreNewRow(const Arguments& a, Shared<kDim>& shared) {
  const CtaTask& task = shared.task;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < a.group; head += kWarps) {
    const auto* const q = reinterpret_cast<const FourChannels<T>*>(
        a.q + task.sequence * a.q_stride + int64_t{task.head * a.group + head} * kDim * 2);
    float score = 0;
    for (int column = lane; column < Shape<kDim>::kColumns; column += 32) {
      const float4 x = q[column].floats();
      const float4 k = NewChannels<T>(a.new_k, task.sequence, task.head, column).floats();
      score += x.x * k.x + x.y * k.y + x.z * k.z + x.w * k.w;
    }
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(kAllLanes, score, step);
    if (lane == 0) shared.new_score[head] = score * a.scale;
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void StoreNewRow(const Arguments& a, const CtaTask& task) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  if (static_cast<int>(threadIdx.x) >= 2 * kColumns) return;
  const PagedLayer& l = a.rows.layer;
  const int32_t page = task.rows.newest >> a.rows.page_shift;
  const int32_t slot = task.rows.newest - (page << a.rows.page_shift);
  const bool is_value = threadIdx.x >= kColumns;
  const int column = threadIdx.x % kColumns;
  const uint64_t row = l.pages[int64_t{task.sequence} * l.page_stride + page] +
                       (is_value ? l.value_offset : l.key_offset) + task.head * l.head_stride +
                       slot * l.slot_stride;
  const FourChannels<T> x =
      NewChannels<T>(is_value ? a.new_v : a.new_k, task.sequence, task.head, column);
  reinterpret_cast<FourChannels<T>*>(row)[column] = x;
  if (AnyNotFinite(x.NotFinite())) NoteNotFinite(a.not_finite, task.sequence);
}

}  // namespace kvstrata::cuda
