// SPDX-License-Identifier: Apache-2.0
// Segmenter `page`: units of index.unit tokens with the element-wise minimum and maximum of their
// keys, exact in the keys' dtype (docs/spec/beyond.md, "quest"), or with mean and variance (10
// there); for selector `block` with their mean.
#include "kernels/segment/complete_units.h"
#include "kernels/segment/index_rows.h"
#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

class PageSegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan& plan, const Geometry& geometry) const override {
    const auto kind = plan.selector == SelectorKind::kBlock ? IndexLayout::Kind::kMean
                      : plan.minmax.deviation               ? IndexLayout::Kind::kDeviation
                                                            : IndexLayout::Kind::kMinMax;
    // Means that rank blocks are fp32 on the CPU (ADR 15).
    return MakeIndexLayout(kind, geometry, &plan.index.unit, 1, HasCoarseRows(plan), DType::kF32);
  }

  void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
              int32_t from, int32_t to, const Backend& backend, Executor& executor) const override {
    SummarizeCompleteUnits(geometry, index, view, from, to, backend, executor);
  }
};

}  // namespace

std::string_view NameOf(RestKind k) { return kRestNames[static_cast<size_t>(k)]; }

const Segmenter& PageSegmenterInstance() {
  static const PageSegmenter segmenter;
  return segmenter;
}

}  // namespace kvstrata
