// Segmenter `page`: units of plan.page tokens with the element-wise minimum and maximum of their
// keys, exact in the keys' dtype (spec/common.md, "quest"); for selector `block` with their mean,
// in fp32.
#include "kernels/segment/complete_units.h"
#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

class PageSegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan& plan, const Geometry& geometry) const override {
    const CoarseFields coarse = CoarseFieldsOf(plan);
    if (plan.selector == SelectorKind::kBlock) {
      // Scores of block means lie close together: bf16 would choose others (DECISIONS 25).
      return MakeIndexLayout(IndexLayout::Kind::kMean, geometry, &plan.page, 1, coarse,
                             DType::kF32);
    }
    return MakeIndexLayout(IndexLayout::Kind::kMinMax, geometry, &plan.page, 1, coarse);
  }

  void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
              int32_t from, int32_t to, const Backend& backend, Executor& executor) const override {
    SummarizeCompleteUnits(geometry, index, view, from, to, backend, executor);
  }
};

}  // namespace

const Segmenter& PageSegmenterInstance() {
  static const PageSegmenter segmenter;
  return segmenter;
}

}  // namespace kvstrata
