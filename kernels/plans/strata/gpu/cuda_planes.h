// SPDX-License-Identifier: Apache-2.0
// CudaPlanes: codec planes on a GPU. Rows of groups that are not sealed are attended on their
// pages, and op attend_planes merges them with the sealed ones, of which it finds those that are
// read by all of their planes. Of several new tokens of a member each reads all of them so, and so
// do those of a prompt that was opened without its raw rows.
//
// One table serves all layers and heads, and a graph stays good while the daemon seals more, as
// long as sequences have room for their tokens.
// Where lower runs lie in the host's memory, rows that were fine lately are in a cache of the
// sequence's own (cuda_hot_rows.h).
// While lower runs are on their way from a tier a sequence's table names others that stand for them
// (mid_cell_run.h), and no copies. The first Begin behind the table that has all of them writes its
// addresses, on the stream, so steps under way end as they began, and no graph is stale.
// Threads: as CudaCodec. Cost: 16 bytes a group of 64 tokens and sequence, 16 a layer, KV head and
// sequence, and some MB; hot caches are their sequences'. The first sequence of a `keep` whose
// lower runs are on their way takes what one group takes, makes graphs stale, and waits. With a
// `share` 4 bytes more a packed token, query head and sequence, and as many a KV head.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/plans/strata/planes.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/memory/hot_cache_budget.h"
#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

struct CudaCodecSource;  // cuda_selector_rows.h

class CudaPlanes final : public CudaCodec {
 public:
  explicit CudaPlanes(const CudaCodecSource& from);

  int32_t EndOf(const SequenceState& state) const override;
  // Extents hold groups of the plan's form, a power of two of them, as recompressors make them.
  Status Check(const CudaFrame& frame) const override;
  Status Fit(const CudaFrame& frame) override;
  Status Stage(CudaFrame* frame) override;
  Status Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                const MutableRows& out, float* lse) override;
  // Bytes are those that were fetched, those of hot caches apart, too. Sealed rows count as coarse
  // ones, or, where all of them are read by all of their planes, as rows.
  Status AddReads(const CudaFrame& frame, const CudaPart& part, int member, int layer,
                  StepCost* cost) const override;

 private:
  struct Room {
    int32_t members = 0;
    int32_t groups = 0;     // that a sequence may have
    bool by_share = false;  // a plan has a share
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame);
  // Runs that stand for those that are on their way.
  Status FitMidCells(const CudaFrame& frame, const PlanesFormat& format);
  DeviceBuffer& MidCellsOf(const PlanesFormat& format) {
    return mid_cells_[format.keep == 8 ? 1 : 0];
  }
  // Null: nothing of the member is sealed, or it is of another codec.
  const PlanesStorage* StoredOf(const CudaFrame& frame, int member) const;
  // Whether the tables on the GPU are those of the member's extents.
  bool Knows(int member, const PlanesStorage& stored) const;
  Status StageMember(CudaFrame* frame, int member, const PlanesStorage& stored);
  Status StageHotRows(CudaFrame* frame, int member);
  // Whether all members of the part attend the layer in full, whatever their lengths.
  static bool InFull(const CudaFrame& frame, const CudaPart& part, int layer);
  cuda::DevicePlanes PlanesOf(const CudaFrame& frame, const CudaPart& part, int layer) const;
  uint64_t* FetchedOf(const CudaFrame& frame, int member, int layer) const;
  uint64_t* HotOf(const CudaFrame& frame, int member, int layer) const;
  // One new token of each of the part's members, the first of them row `row` of the batch.
  Status AttendItems(CudaFrame* frame, const CudaPart& part, int layer, int32_t row, const Rows& q,
                     const MutableRows& out, float* lse);

  const std::shared_ptr<HotCacheBudget> hot_cache_budget_;
  // Where sealed rows end, 0, their groups; N, or 0 where the member attends in full.
  const StepMemory::Column end_, none_, groups_, tokens_;
  Room room_;
  WordTable upper_, lower_;    // by member, a group each: cuda::DeviceRuns
  std::vector<uint64_t> ids_;  // by member, whose the tables are: PlanesStorage::id; 0: nobody's
  DeviceBuffer partial_;       // m, l, o of the raw rows
  DeviceBuffer workspace_;     // for op attend_planes
  WordTable hot_;              // by member: cuda::HotSequence
  DeviceBuffer mid_cells_[2];  // MidCellRun [layers][kv_heads], of `keep` 4 and 8
  DeviceBuffer fetched_;       // bytes [2][layers][members][kv_heads] of this step: all, hot ones
};

}  // namespace kvstrata
