// SPDX-License-Identifier: Apache-2.0
// CudaLists: what op pick writes: of each list the units that it took, how many, and between which
// positions they lie. Private to selectors on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaLists {
 public:
  // One member's lists, read back by the host.
  struct Read {
    std::vector<int32_t> counts;  // by group
    std::vector<int32_t> units;   // [groups][stride]
    int32_t sink_end = 0, recent_begin = 0;
  };

  // `groups` lists a member, of up to `stride` units.
  Status Fit(StepMemory* memory, int32_t members, int32_t groups, int32_t stride);
  int32_t stride() const { return stride_; }

  // The lists of a part's members.
  cuda::DeviceSelection SelectionOf(const CudaPart& part, int32_t unit_tokens) const;
  // Makes the op write there.
  void WriteTo(const CudaPart& part, cuda::PickBatch* pick) const;
  Result<Read> ReadMember(const CudaFrame& frame, int member) const;

 private:
  int32_t groups_ = 0, stride_ = 0;
  DeviceBuffer units_, counts_, sink_end_, recent_begin_;
};

// Bytes of op pick's scratch for any number of members up to `members`: small batches have more
// CTAs a list.
int64_t PickScratchBytes(const cuda::CudaOps& ops, int32_t members, int32_t groups,
                         int32_t score_stride);
// Bytes of op vote's scratch.
int64_t VoteScratchBytes(const cuda::CudaOps& ops, const cuda::VoteBatch& shape, int32_t items);

}  // namespace kvstrata
