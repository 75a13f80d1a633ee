// SPDX-License-Identifier: Apache-2.0
// CudaFrame: what selectors and codecs on a GPU see of an open step: its members, where their rows
// lie, the stream, and memory. CudaStep (cuda_step.h) is the one frame; it runs them.
//
// Addresses are the device's. Nothing here waits for the GPU but CopyToHost.
// Threads: one call at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/step/gpu/frame/cuda_part.h"
#include "kernels/step/gpu/frame/cuda_workspace.h"
#include "kernels/step/gpu/memory/step_memory.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaFrame : public StepBatch {
 public:
  using StepBatch::geometry;

  const cuda::CudaOps& ops() const { return ops_; }
  // Begin's, except in a call that is being captured as a graph (repeated_call.h).
  cuda::Stream stream() const { return stream_; }
  StepMemory& memory() const { return ws_.memory_; }
  Status Check(int code, const char* what) const { return CudaStatus(ops_, code, what); }
  Result<bool> IsCapturing(cuda::Stream stream) const;

  SequenceState& state(int member) const { return *members_[static_cast<size_t>(member)].state; }
  const Plan& plan(int member) const { return state(member).plan(); }
  // Null: everything is attended; of codec raw.
  CudaSelector* SelectorOf(int member) const { return ws_.SelectorOf(plan(member)); }
  CudaCodec* CodecOf(int member) const { return ws_.CodecOf(plan(member)); }
  // Tokens that the member has behind the step, or that room is kept for.
  int32_t RoomFor(int member) const {
    const StepMember& m = members_[static_cast<size_t>(member)];
    return std::max(m.view.tokens + m.new_tokens, ws_.reserve_tokens_);
  }
  // Row of the batch of the first new token of a part.
  int32_t FirstRow(const CudaPart& part) const {
    return first_row_[static_cast<size_t>(part.first)] + part.begin;
  }
  // The positions that each row sees, from row `row` on.
  const int32_t* VisibleFrom(int32_t row) const { return memory().visible() + row; }

  // The last part that holds new tokens of the member.
  const CudaPart& PartOf(int member) const;
  // Tables of members from `first` on.
  cuda::PagedLayer PagesOf(int first, int layer) const;
  cuda::NotFiniteWords NotFiniteOf(int first) const {
    return {ws_.not_finite_, memory().On(ws_.words_, first)};
  }
  cuda::DeviceRows IndexRowsOf(int first, int level, int layer) const {
    return ws_.index_.RowsOf(*this, first, level, layer);
  }
  cuda::DeviceGroups IndexGroupsOf(int first, int layer) const {
    return ws_.index_.GroupsOf(*this, first, layer);
  }

  // Whether the selector chooses in this layer.
  bool Selects(const CudaPart& part, int layer) const;
  // What it chose; of everything {}.
  cuda::DeviceSelection SelectionOf(const CudaPart& part, int layer) const;
  // The last layer that was selected, attended or replayed; -1: none.
  int selected_layer() const { return selected_layer_; }

  // A batch of raw rows, one item a row from `row` on, over what the pages hold and new rows that
  // no op has appended yet. The caller adds selection and output.
  cuda::AttendRawBatch AttendRawOf(const CudaPart& part, int layer, int32_t row,
                                   const Rows& q) const;
  cuda::AttentionOutput OutputFrom(int32_t row, const MutableRows& out, float* lse) const;
  // Zero between ops; scratch of op attend_raw.
  uint32_t* counters() const { return ws_.attend_counters_.as<uint32_t>(); }

  // How often new rows or queries were written: an op that reads them may only read ahead of the
  // kernel before it when they were written before that one.
  int64_t writes() const { return writes_; }
  // Runs `enqueue` in Begin, when the index rows of all complete units are enqueued.
  void OnceIndexed(std::function<Status()> enqueue) { once_indexed_.push_back(std::move(enqueue)); }
  // A kernel of Begin's was enqueued.
  void NoteLaunch() { launched_ = true; }

  // Waits.
  Status CopyToHost(void* to, const void* from, uint64_t bytes) const;

 protected:
  // Rows of one layer, where the layer's attention will read them and write them to their pages.
  struct NewRows {
    int layer = -1;
    cuda::DeviceSource k, v;
  };

  CudaFrame(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream)
      : StepBatch(std::move(members)),
        ws_(*workspace),
        ops_(workspace->memory_.ops()),
        stream_(stream) {}
  ~CudaFrame() = default;

  CudaWorkspace& ws_;
  const cuda::CudaOps& ops_;
  cuda::Stream stream_;
  std::vector<CudaPart> parts_;
  std::vector<std::function<Status()>> once_indexed_;
  NewRows pending_;  // those of a layer that was appended, but not attended yet
  int selected_layer_ = -1;
  int64_t writes_ = 0;
  bool launched_ = false;
};

}  // namespace kvstrata
