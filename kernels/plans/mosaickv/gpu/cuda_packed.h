// SPDX-License-Identifier: Apache-2.0
// CudaPacked: codec packed (mosaickv) on a GPU. Packed rows are attended in blocks, each KV head's
// own, or all of them; rows that are not packed yet are attended on their pages, and op
// attend_packed merges the two.
//
// A graph stays good while the daemon packs more, until there are more extents than there is room
// for. Threads: as CudaCodec. Cost: of each sequence 72 bytes an extent, layer and KV head, and
// about 2 MB.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaPacked final : public CudaCodec {
 public:
  explicit CudaPacked(StepMemory* memory);

  int32_t EndOf(const SequenceState& state) const override;
  // The ops take so many extents, all of the plan's strategy, but that max_loss may have kept more
  // elements of a vector, the same number in all heads: other ones are damaged.
  Status Check(const CudaFrame& frame) const override;
  Status Fit(const CudaFrame& frame) override;
  Status Stage(CudaFrame* frame) override;
  Status Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                const MutableRows& out, float* lse) override;

  // The packed rows of a part's members.
  cuda::PackedLayer LayerOf(const CudaFrame& frame, const CudaPart& part, int layer) const;

 private:
  struct Room {
    int32_t members = 0;
    int32_t segments = 0;  // extents of a sequence
    int32_t keep = 0;      // elements of a vector, at most
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame);
  // Whether the table on the GPU is that of the member's extents.
  bool Knows(const CudaFrame& frame, int member) const;
  Status StageMember(CudaFrame* frame, int member);
  // One new token of each of the part's members, the first of them row `row` of the batch.
  Status AttendItems(CudaFrame* frame, const CudaPart& part, int layer, int32_t row, const Rows& q,
                     const MutableRows& out, float* lse);

  const StepMemory::Column end_, none_, segments_;
  Room room_;
  WordTable table_;            // cuda::PackedSegment [layers][members][segments][kv_heads]
  std::vector<uint64_t> ids_;  // by member, whose the table is: PackedStorage::id; 0: nobody's
  DeviceBuffer partial_;       // m, l, o of the raw rows
  DeviceBuffer workspace_;     // for op attend_packed
};

}  // namespace kvstrata
