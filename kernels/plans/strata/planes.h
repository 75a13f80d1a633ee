// SPDX-License-Identifier: Apache-2.0
// PlanesStorage: the reading side of codec planes (docs/spec/planes.md): sealed groups as a
// sequence's extents hold them. What of it a step reads finely is the selection's rule; without one
// all of it is. While lower runs are on their way from a tier nothing is.
//
// Threads: immutable; any. Ownership: points into the extents. Cost of Parse: an extent each.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/plans/strata/planes_layout.h"

namespace kvstrata {

class PlanesStorage final : public StoredRows {
 public:
  explicit PlanesStorage(const Geometry& geometry) : StoredRows(false), geometry_(geometry) {}

  // DATA_LOSS EXTENT_INVALID: an extent is damaged, does not follow the one before it, or has
  // groups of another form.
  static Result<std::unique_ptr<PlanesStorage>> Parse(const SequenceView& view,
                                                      const Geometry& geometry);

  std::span<const PlanesExtent> extents() const { return extents_; }
  // Names this Parse in this process; never 0.
  uint64_t id() const { return id_; }

  void PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                  StoredPlan* plan) const override;
  void AddSlice(const Selection& selection, const StoredSlice& slice, std::span<const Run> runs,
                const QueryTile& tile, AttendWorks* works) const override;
  void CountReads(const HeadReads&, ReadCost*) const override {}  // the op says what it read
  void AppendUnits(std::span<const int32_t>, std::vector<Run>*) const override {}
  void AddScores(const KeyScores& scores, ScoreWorks* works) const override;
  int64_t KeyBytes(int layer, Run range) const override;

 private:
  const Geometry geometry_;
  std::vector<PlanesExtent> extents_;  // in order, from position 0 on, all of one format
  uint64_t id_ = 0;
};

Result<InspectArray> InspectPlanes(const SelectContext& context, std::string_view name);
CodecCost PlanesCost(const Plan& plan, const Geometry& geometry);

}  // namespace kvstrata
