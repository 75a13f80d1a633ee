// The parts of one (sequence, KV head) in shared memory, and what lies where in them.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SPAN_PARTS_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SPAN_PARTS_CUH_

#include "kernels/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

struct SpanParts {
  SpanPart at[kSpanPartsMax];
  int32_t count;

  // Barrier afterwards.
  __device__ __forceinline__ void Load(const SpanLayer& layer, int sequence) {
    const auto* from =
        reinterpret_cast<const uint64_t*>(layer.parts + int64_t{sequence} * layer.part_stride);
    // The table is read without waiting for its length: what lies behind the end is not used.
    constexpr int kWords = sizeof(SpanPart) / sizeof(uint64_t);
    for (int i = threadIdx.x; i < layer.part_stride * kWords; i += blockDim.x) {
      reinterpret_cast<uint64_t*>(at)[i] = from[i];
    }
    if (threadIdx.x == 0) count = min(max(layer.counts[sequence], 0), layer.part_stride);
  }
  __device__ __forceinline__ int32_t spans() const {
    return count == 0 ? 0 : at[count - 1].first_span + at[count - 1].span_count;
  }
  __device__ __forceinline__ const SpanPart& Of(int32_t span) const {
    int i = 0;
    while (i + 1 < count && at[i + 1].first_span <= span) ++i;
    return at[i];
  }
};

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

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_SPANS_SPAN_PARTS_CUH_
