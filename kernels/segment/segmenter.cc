// SPDX-License-Identifier: Apache-2.0
#include "kernels/segment/segmenter.h"

namespace kvstrata {

const Segmenter& PageSegmenterInstance();
const Segmenter& HierarchySegmenterInstance();
const Segmenter& BitsSegmenterInstance();

namespace {

// `none`: no index, nothing to keep up to date. Sentences are the selector's own summaries; spans
// and loss segments are the codec's.
class NoSegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan&, const Geometry&) const override { return {}; }
  void Update(const Geometry&, const IndexLayout&, const SequenceView&, int32_t, int32_t,
              const Backend&, Executor&) const override {}
};

const Segmenter& NoSegmenterInstance() {
  static const NoSegmenter segmenter;
  return segmenter;
}

}  // namespace

const Segmenter& SegmenterOf(SegmenterKind kind) {
  static constexpr const Segmenter& (*kInstances[])() = {
      NoSegmenterInstance, PageSegmenterInstance, HierarchySegmenterInstance, NoSegmenterInstance,
      NoSegmenterInstance, NoSegmenterInstance,   BitsSegmenterInstance};  // by SegmenterKind
  return kInstances[static_cast<size_t>(kind)]();
}

IndexLayout IndexOf(const Plan& plan, const Geometry& geometry) {
  return SegmenterOf(plan.segmenter()).Layout(plan, geometry);
}

// Rows and groups grow with layers, heads and channels as pages do.
double IndexShare(const Plan& plan) {
  const Geometry any{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 128, .rotary = {}};
  const IndexLayout index = IndexOf(plan, any);
  if (index.kind == IndexLayout::Kind::kNone) return 0;
  const double page = static_cast<double>(any.page_bytes()) / any.page_tokens;
  return static_cast<double>(index.block_bytes) / index.block_tokens / page;
}

}  // namespace kvstrata
