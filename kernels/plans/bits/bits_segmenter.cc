// SPDX-License-Identifier: Apache-2.0
// Segmenter `bits`: units are groups of index.unit tokens, kept as their keys in plan.bits.bits
// bits a channel (docs/spec/bits.md). Only sealed groups are written; tokens of the one that is
// filling are scored by their keys.
#include <array>

#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

// Groups of one call of the op.
constexpr size_t kGroupsAtOnce = 32;

class BitsSegmenter final : public Segmenter {
 public:
  IndexLayout Layout(const Plan& plan, const Geometry& geometry) const override {
    return MakeBitsLayout(geometry, plan.bits.bits, plan.index.unit);
  }

  // One (layer, KV head) depends on nothing but itself: parallel over them.
  void Update(const Geometry& geometry, const IndexLayout& index, const SequenceView& view,
              int32_t from, int32_t to, const Backend& backend, Executor& executor) const override {
    const Run groups = {index.UnitsFor(0, from), index.UnitsFor(0, to)};
    if (groups.begin >= groups.end) return;
    executor.ParallelFor(int64_t{geometry.layers} * geometry.kv_heads, [&](int64_t i) {
      const int layer = static_cast<int>(i / geometry.kv_heads);
      const int head = static_cast<int>(i % geometry.kv_heads);
      const PagedRows keys = KeysOf(view.pages, PageLayout::Of(geometry), layer, head);
      std::array<QuantiseKeysWork, kGroupsAtOnce> works;
      size_t n = 0;
      for (int32_t group = groups.begin; group < groups.end; ++group) {
        works[n++] = {keys, group * index.levels[0].unit_tokens, index.group(),
                      index.Row(view.index_blocks, 0, layer, 0, head, group)};
        if (n < works.size() && group + 1 < groups.end) continue;
        // Inline: this already runs inside a ParallelFor.
        backend.quantise_keys(works.data(), static_cast<int64_t>(n), InlineExecutor());
        n = 0;
      }
    });
  }
};

}  // namespace

const Segmenter& BitsSegmenterInstance() {
  static const BitsSegmenter segmenter;
  return segmenter;
}

}  // namespace kvstrata
