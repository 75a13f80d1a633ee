// SPDX-License-Identifier: Apache-2.0
// Segmenter `hierarchy`: pages, chunks of pages and grids of chunks, each with its mean, rounded to
// bf16 (docs/spec/chess.md 1). Only complete units have rows: those that are still filling are made
// by the selector when it selects, because a stored row must never change.
#include "kernels/segment/complete_units.h"
#include "kernels/segment/index_rows.h"
#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

class HierarchySegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan& plan, const Geometry& geometry) const override {
    const int32_t units[] = {plan.index.unit, plan.index.pages_per_chunk,
                             plan.index.chunks_per_grid};
    return MakeIndexLayout(IndexLayout::Kind::kMean, geometry, units, 3, HasCoarseRows(plan));
  }

  void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
              int32_t from, int32_t to, const Backend& backend, Executor& executor) const override {
    SummarizeCompleteUnits(geometry, index, view, from, to, backend, executor);
  }
};

}  // namespace

// An index block holds whole grids; beyond this a block outgrows what a pool can hand out.
Status CheckGrid(const IndexOptions& index) {
  constexpr int64_t kMaxGridTokens = 65536;
  const int64_t grid = int64_t{index.unit} * index.pages_per_chunk * index.chunks_per_grid;
  if (grid <= kMaxGridTokens) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         Assigned("page", index.unit) + " times " +
                             Assigned("pages_per_chunk", index.pages_per_chunk) + " times " +
                             Assigned("chunks_per_grid", index.chunks_per_grid) +
                             " makes a grid of " + std::to_string(grid) + " tokens; at most " +
                             std::to_string(kMaxGridTokens) + " can be indexed");
}

const Segmenter& HierarchySegmenterInstance() {
  static const HierarchySegmenter segmenter;
  return segmenter;
}

}  // namespace kvstrata
