// Segmenter `hierarchy`: pages, chunks of pages and grids of chunks, each with its mean, rounded to
// bf16 (docs/spec/chess.md 1). Only complete units have rows: those that are still filling are made
// by the selector when it selects, because a stored row must never change.
#include "kernels/segment/complete_units.h"
#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

class HierarchySegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan& plan, const Geometry& geometry) const override {
    const int32_t units[] = {plan.page, plan.pages_per_chunk, plan.chunks_per_grid};
    return MakeIndexLayout(IndexLayout::Kind::kMean, geometry, units, 3, HasCoarseRows(plan));
  }

  void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
              int32_t from, int32_t to, const Backend& backend, Executor& executor) const override {
    SummarizeCompleteUnits(geometry, index, view, from, to, backend, executor);
  }
};

}  // namespace

const Segmenter& HierarchySegmenterInstance() {
  static const HierarchySegmenter segmenter;
  return segmenter;
}

}  // namespace kvstrata
