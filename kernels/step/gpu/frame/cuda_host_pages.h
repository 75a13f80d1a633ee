// SPDX-License-Identifier: Apache-2.0
// CudaHostPages: how steps on a GPU attend pages that lie in the host's memory. What a layer
// selects of them is promoted first: copied into the sequence's cache on the GPU
// (cuda_hot_pages.h), where it stays as long as it is selected often. The rest is attended in
// place, over the bus.
//
// Belongs to a workspace, as a CudaSelector does. Threads: one call at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/batches/hot_pages.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/pages/page_view.h"
#include "kernels/step/gpu/frame/cuda_part.h"
#include "kernels/step/gpu/memory/hot_cache_budget.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

class CudaFrame;  // cuda_frame.h

class CudaHostPages {
 public:
  // budget: of the sequences' caches; null: as much as the GPU has.
  CudaHostPages(StepMemory* memory, std::shared_ptr<HotCacheBudget> budget);

  // Whether the member has pages in the host's memory, of which selected ones are promoted.
  static bool MayPromote(const CudaFrame& frame, int member);

  Status Fit(const CudaFrame& frame, int32_t pages);
  // Tables of the members' caches; null where none is, as of a graph's member that has none now.
  Status Stage(CudaFrame* frame);
  // Between a layer's selection and its attention, which finds in `pages` what is promoted.
  Status Promote(const CudaFrame& frame, const CudaPart& part, int layer, cuda::PagedLayer* pages);

 private:
  // Entries of pages that came or moved are made anew.
  Status Follow(CudaFrame* frame, int member);

  const std::shared_ptr<HotCacheBudget> budget_;
  const StepMemory::Column committed_;
  WordTable pages_, tables_;  // by member: cuda::HotPages::pages, a cuda::HotPages
  DeviceBuffer counters_;     // for op promote
};

}  // namespace kvstrata
