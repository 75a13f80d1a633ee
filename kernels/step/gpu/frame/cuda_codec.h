// SPDX-License-Identifier: Apache-2.0
// CudaCodec: the reading side of a codec on a GPU: rows that extents hold, attended where a
// selection says, together with those that are still on pages.
//
// An object belongs to a workspace, as a CudaSelector. Where the extents' arrays lie is a table on
// the GPU, which Stage brings up to date when the daemon has stored more: a graph reads what is
// there and stays good. Implementations: cuda_packed.h, cuda_planes.h, cuda_spans.cc.
// Threads: one call at a time.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/step/gpu/frame/cuda_part.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaFrame;  // cuda_frame.h

class CudaCodec {
 public:
  CudaCodec(const CudaCodec&) = delete;
  CudaCodec& operator=(const CudaCodec&) = delete;
  virtual ~CudaCodec() = default;

  // Whether attention takes a token's new rows from the caller's tensors.
  bool attends_new_rows() const { return attends_new_rows_; }
  // Positions below it are held by extents.
  virtual int32_t EndOf(const SequenceState& state) const = 0;

  // Whether the members' extents can be read. UNIMPLEMENTED CUDA_PLAN, DATA_LOSS EXTENT_INVALID.
  virtual Status Check(const CudaFrame& frame) const = 0;
  virtual Status Fit(const CudaFrame& frame) = 0;
  virtual Status Stage(CudaFrame* frame) = 0;

  // The part's new tokens, over all that the layer's selection leaves. lse may be null.
  virtual Status Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                        const MutableRows& out, float* lse) = 0;

  // Adds what attending the layer read of a member's extents, where an op alone knows it. Waits.
  virtual Status AddReads(const CudaFrame&, const CudaPart&, int /*member*/, int /*layer*/,
                          StepCost*) const {
    return OkStatus();
  }

 protected:
  explicit CudaCodec(bool attends_new_rows) : attends_new_rows_(attends_new_rows) {}
  // Whether it is the member's.
  bool Has(const CudaFrame& frame, int member) const;

 private:
  const bool attends_new_rows_;
};

}  // namespace kvstrata
