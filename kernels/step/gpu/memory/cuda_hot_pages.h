// SPDX-License-Identifier: Apache-2.0
// CudaHotPages: the hot cache of one sequence whose steps are CudaSteps
// (kernels/cuda/batches/hot_pages.h): memory of a GPU that holds copies of slices of pages in the
// host's memory, the last selected ones. It goes with the sequence, whatever batch, workspace or
// stream that is in, and is there as long as a page lies in the host's memory. A fork begins
// without one.
//
// Threads: as SequenceState. Cost: SlotsOf pages of memory, and 8 bytes a page, layer and KV head:
// with Llama-3.1-8B and 128K tokens 570 MB for quest, 2.2 GB for sentencekv. Where a budget has
// less left there are fewer slots; where a GPU has not so much left, pages are attended in place.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/batches/hot_pages.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/plan/plan.h"
#include "kernels/step/gpu/memory/hot_cache_budget.h"

namespace kvstrata {

class CudaHotPages {
 public:
  // Empty, for up to `page_stride` pages. Where the budget (null: there is none) or the GPU has no
  // memory for it, `table` says so.
  static Result<std::shared_ptr<CudaHotPages>> Create(const cuda::CudaOps& ops,
                                                      const Geometry& geometry, const Plan& plan,
                                                      int32_t page_stride,
                                                      std::shared_ptr<HotCacheBudget> budget);
  CudaHotPages(const CudaHotPages&) = delete;
  CudaHotPages& operator=(const CudaHotPages&) = delete;
  ~CudaHotPages();
  // Slots of a (layer, KV head): for a list of pages twice what a step attends, for a list of
  // tokens once, each of them in a page of its own; no more than there are pages.
  static int32_t SlotsOf(const Plan& plan, const Geometry& geometry, int32_t pages);

  cuda::HotPages table() const;
  int32_t page_stride() const { return page_stride_; }

  // What `table().pages` is once the stream gets there.
  std::vector<uint64_t> pages;

 private:
  CudaHotPages(const Geometry& geometry, int32_t page_stride,
               std::shared_ptr<HotCacheBudget> budget);
  Status Reserve(const cuda::CudaOps& ops);
  Status Free();
  uint64_t entry_bytes() const;
  uint64_t owner_bytes() const { return 2 * static_cast<uint64_t>(rows_) * sizeof(int32_t); }

  const int32_t page_stride_;
  const int64_t rows_;
  const uint64_t slot_bytes_;  // over all layers
  int32_t slot_count_ = 0;
  const std::shared_ptr<HotCacheBudget> budget_;
  DeviceBuffer entries_, slots_, owners_;
};

}  // namespace kvstrata
