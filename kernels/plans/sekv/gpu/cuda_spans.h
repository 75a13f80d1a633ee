// SPDX-License-Identifier: Apache-2.0
// CudaSpans: codec lowrank (plan sekv) on a GPU: spans are scored and chosen by the GPU, and
// attended with everything else in one kernel (ops/attend_spans). Where the arrays of a part of
// them lie comes from its extents' descriptions (SpanStorage); the room for expansions follows from
// counts, which the host has.
//
// Threads: as CudaCodec. Cost: 12 bytes a span, query head and sequence, and 16 a span, KV head and
// sequence.
#ifndef KVSTRATA_KERNELS_PLANS_SEKV_GPU_CUDA_SPANS_H_
#define KVSTRATA_KERNELS_PLANS_SEKV_GPU_CUDA_SPANS_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/plans/sekv/ops/span_cuda_ops.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaSpans final : public CudaCodec {
 public:
  explicit CudaSpans(StepMemory* memory);

  int32_t EndOf(const SequenceState& state) const override;
  Status Check(const CudaFrame& frame) const override;
  Status Fit(const CudaFrame& frame) override;
  Status Stage(CudaFrame* frame) override;
  // Later new tokens attend what was chosen for the first; their coarse rows are scored for each.
  Status Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                const MutableRows& out, float* lse) override;

  // Scores the spans by one new token of each member, row `row` on of q, and lists those to expand.
  // The relevance of the first token is what spans are chosen by.
  Status Choose(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q, int32_t row,
                bool first);
  // What a KV head of a member lists: a span, and the heads of its group that expand it.
  Result<std::vector<uint32_t>> ReadList(const CudaFrame& frame, int member, int head) const;

 private:
  struct Room {
    int32_t members = 0;
    int32_t parts = 0, spans = 0;  // a member has at most so many
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame);
  Status StageMember(CudaFrame* frame, int member);
  cuda::SpanLayer LayerOf(const CudaFrame& frame, const CudaPart& part, int layer) const;
  cuda::SpanQueries QueriesOf(const CudaFrame& frame, const CudaPart& part, const Rows& q,
                              int32_t row) const;
  float* CoarseOf(const CudaFrame& frame, const CudaPart& part) const;
  uint32_t* ListOf(const CudaFrame& frame, int member) const;

  // cuda::SpanParts, room for expansions, end of what spans cover; kExpandAll of every member.
  const StepMemory::Column counts_, expand_, end_, expand_all_;
  Room room_;
  WordTable parts_, routers_;  // cuda::SpanPart [members][parts], cuda::SpanRouter [members]
  std::vector<uint64_t> ids_;  // by member, whose the tables are: SpanStorage::id; 0: nobody's
  DeviceBuffer relevance_, later_relevance_, coarse_, chosen_;  // for all query heads
  DeviceBuffer list_, list_counts_;                             // for all KV heads
  DeviceBuffer workspace_;                                      // for op attend_spans
  int chosen_layer_ = -1;
  int64_t chosen_writes_ = 0;  // CudaFrame::writes then
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLANS_SEKV_GPU_CUDA_SPANS_H_
