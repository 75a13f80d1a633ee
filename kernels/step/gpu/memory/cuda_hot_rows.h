// SPDX-License-Identifier: Apache-2.0
// CudaHotRows: the hot cache of one sequence whose lower rows of planes lie in the host's memory:
// memory of a GPU that holds copies of those that were fine lately, a few of each group
// (cuda::HotRows). It goes with the sequence, whatever batch, workspace or stream that is in. What
// is sealed neither changes nor is taken back, so copies stay good. A fork begins without one.
//
// Threads: as SequenceState. Cost: groups times heads times rows, each as long as a lower row and a
// byte: with Llama-3.1-8B, 128K tokens and 8 rows 810 MB. Where a budget has less left there is
// room for fewer groups; where a GPU has not so much left, rows are read in place.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/memory/hot_cache_budget.h"

namespace kvstrata {

class CudaHotRows {
 public:
  // What one group has, in all layers and KV heads.
  struct Shape {
    int64_t heads = 0;
    int32_t rows = 0;
    int64_t row_bytes = 0;  // a multiple of 16

    uint64_t tag_bytes() const { return static_cast<uint64_t>(heads * rows); }
    uint64_t group_bytes() const { return tag_bytes() * static_cast<uint64_t>(1 + row_bytes); }
  };

  // Empty, for `groups` groups. Where the budget (null: there is none) or the GPU has no memory for
  // it, `table` says so. CUDA_ERROR.
  static Result<std::shared_ptr<CudaHotRows>> Create(const cuda::CudaOps& ops, const Shape& shape,
                                                     int32_t groups,
                                                     std::shared_ptr<HotCacheBudget> budget);
  CudaHotRows(const CudaHotRows&) = delete;
  CudaHotRows& operator=(const CudaHotRows&) = delete;
  ~CudaHotRows();

  cuda::HotSequence table() const;
  int32_t groups() const { return groups_; }  // that were asked for

 private:
  CudaHotRows(const Shape& shape, int32_t groups, std::shared_ptr<HotCacheBudget> budget);
  Status Reserve(const cuda::CudaOps& ops);
  Status Free();

  const Shape shape_;
  const int32_t groups_;
  uint64_t held_ = 0;  // groups that there is memory for
  const std::shared_ptr<HotCacheBudget> budget_;
  DeviceBuffer tags_, copies_;
};

}  // namespace kvstrata
