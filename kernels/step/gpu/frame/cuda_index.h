// SPDX-License-Identifier: Apache-2.0
// CudaIndex: the index of a step's members on a GPU: where its blocks lie, and the rows of units
// that steps completed, which a Begin writes.
//
// Belongs to a workspace, as a CudaSelector does. Threads: one call at a time.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/quantise_keys/device_groups.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaFrame;  // cuda_frame.h

class CudaIndex {
 public:
  explicit CudaIndex(StepMemory* memory);

  Status Fit(const CudaFrame& frame);
  Status Stage(CudaFrame* frame);
  // Rows of the units that were completed since the index was written last, in all layers.
  Status Summarize(CudaFrame* frame);
  // The index of members from `first` on: field 0 of a level, and of keys in few bits the groups.
  cuda::DeviceRows RowsOf(const CudaFrame& frame, int first, int level, int layer) const;
  cuda::DeviceGroups GroupsOf(const CudaFrame& frame, int first, int layer) const;

 private:
  Status SummarizeLevel(CudaFrame* frame, int first, int count, int level);
  Status Quantise(CudaFrame* frame, int first, int count);
  // The most units of a level that one of these members completed.
  static int32_t UnitsOf(const CudaFrame& frame, int first, int count, int level);

  const StepMemory::Column from_, to_;  // tokens: the rows written before, and now
  WordTable blocks_;                    // addresses, by member
};

}  // namespace kvstrata
