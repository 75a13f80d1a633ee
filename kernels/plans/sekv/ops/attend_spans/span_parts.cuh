// SPDX-License-Identifier: Apache-2.0
// The parts of one (sequence, KV head) in shared memory, and what lies where in them.
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

// The parts, at the beginning of a CTA's dynamic shared memory; it takes what the layer has room
// for.
class SpanParts {
 public:
  const SpanPart* const at;
  int32_t& count;

  __device__ __forceinline__ SpanParts(uint4* dynamic, int32_t& count_in_shared_memory)
      : at(reinterpret_cast<const SpanPart*>(dynamic)), count(count_in_shared_memory) {}
  static __host__ __device__ __forceinline__ int BytesOf(const SpanLayer& layer) {
    return layer.part_stride * int{sizeof(SpanPart)};
  }
  // Where the rest of the dynamic shared memory begins.
  static __device__ __forceinline__ uint4* Behind(uint4* dynamic, const SpanLayer& layer) {
    return dynamic + layer.part_stride * int{sizeof(SpanPart) / sizeof(uint4)};
  }

  // Barrier afterwards.
  __device__ __forceinline__ void Load(const SpanLayer& layer, int sequence) const {
    const auto* from =
        reinterpret_cast<const uint64_t*>(layer.parts + int64_t{sequence} * layer.part_stride);
    auto* const to = reinterpret_cast<uint64_t*>(const_cast<SpanPart*>(at));
    // The table is read without waiting for its length: what lies behind the end is not used.
    constexpr int kWords = sizeof(SpanPart) / sizeof(uint64_t);
    for (int i = threadIdx.x; i < layer.part_stride * kWords; i += blockDim.x) to[i] = from[i];
    if (threadIdx.x == 0) count = min(max(layer.counts[sequence], 0), layer.part_stride);
  }
  __device__ __forceinline__ int32_t spans() const {
    return count == 0 ? 0 : at[count - 1].end_span;
  }
  __device__ __forceinline__ int32_t tiles() const {
    return count == 0 ? 0 : at[count - 1].end_tile;
  }
  __device__ __forceinline__ int32_t raw_tiles() const {
    return count == 0 ? 0 : at[count - 1].end_raw_tile;
  }
  // The part that has a span, a tile of spans, a tile of raw rows, which becomes one of the part.
  __device__ __forceinline__ const SpanPart& OfSpan(int32_t& span) const {
    return Holding<&SpanPart::end_span>(span);
  }
  __device__ __forceinline__ const SpanPart& OfTile(int32_t& tile) const {
    return Holding<&SpanPart::end_tile>(tile);
  }
  __device__ __forceinline__ const SpanPart& OfRawTile(int32_t& tile) const {
    return Holding<&SpanPart::end_raw_tile>(tile);
  }

 private:
  template <int32_t SpanPart::*kEnd>
  __device__ __forceinline__ const SpanPart& Holding(int32_t& x) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (at[middle].*kEnd <= x) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low > 0) x -= at[low - 1].*kEnd;
    return at[low];
  }
};

__device__ __forceinline__ int32_t FirstSpan(const SpanPart& part) {
  return part.end_span - part.span_count;
}

__device__ __forceinline__ int32_t SpanLength(const SpanPart& part, int32_t local) {
  const int2 span = reinterpret_cast<const int2*>(part.spans)[local];
  return span.y - span.x;
}

// Pieces of a span of n tokens.
__device__ __forceinline__ int32_t SpanPieces(int32_t n) { return min((n + 31) / 32, kSpanPieces); }

// Means of span 0 of a part, at `means`.
__device__ __forceinline__ uint64_t MeansOf(const SpanLayer& l, const SpanPart& part, int head,
                                            uint64_t means) {
  return means + (int64_t{l.layer} * l.kv_heads + head) * part.span_count * l.head_dim * 2;
}

}  // namespace kvstrata::cuda
