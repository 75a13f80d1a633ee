#include "kernels/segment/complete_units.h"

#include <algorithm>
#include <array>

namespace kvstrata {
namespace {

struct Update {
  const Geometry& geometry;
  const IndexLayout& index;
  const SequenceView& view;
  int32_t from, to;
  const Backend& backend;
};

// What a level's units summarise: tokens, or the rows of the level below dressed as pages.
PagedRows SourceOf(const Update& u, int level, int layer, int head) {
  if (level == 0) return KeysOf(u.view.pages, PageLayout::Of(u.geometry), layer, head);
  const IndexLayout& index = u.index;
  return {u.view.index_blocks,
          index.RowOffset(level - 1, layer, 0, head, 0),
          index.head_dim * SizeOf(index.dtype),
          index.levels[level - 1].units_per_block,
          index.head_dim,
          index.dtype};
}

SummarizeWork UnitWork(const Update& u, int level, int layer, int head, const PagedRows& source,
                       int32_t unit) {
  const IndexLayout& index = u.index;
  const int32_t finer = level == 0 ? 1 : index.levels[level - 1].unit_tokens;
  const int32_t size = index.levels[level].unit_tokens / finer;
  SummarizeWork work;
  work.keys = source;
  work.rows = {unit * size, (unit + 1) * size};
  work.out = index.Row(u.view.index_blocks, level, layer, 0, head, unit);
  work.out_dtype = index.dtype;
  work.kind = SummarizeWork::Kind::kMean;
  if (index.kind == IndexLayout::Kind::kMinMax) {
    work.kind = SummarizeWork::Kind::kMinMax;
    work.out2 = index.Row(u.view.index_blocks, level, layer, 1, head, unit);
  }
  return work;
}

void UpdateLevel(const Update& u, int level, int layer, int head) {
  const PagedRows source = SourceOf(u, level, layer, head);
  const int32_t end = u.index.UnitsFor(level, u.to);
  std::array<SummarizeWork, 32> works;
  size_t n = 0;
  for (int32_t unit = u.index.UnitsFor(level, u.from); unit < end; ++unit) {
    works[n++] = UnitWork(u, level, layer, head, source, unit);
    if (n < works.size() && unit + 1 < end) continue;
    // Inline: this already runs inside a ParallelFor.
    u.backend.summarize(works.data(), static_cast<int64_t>(n), InlineExecutor());
    n = 0;
  }
}

}  // namespace

void SummarizeCompleteUnits(const Geometry& geometry, const IndexLayout& index,
                            const SequenceView& view, int32_t from, int32_t to,
                            const Backend& backend, Executor& executor) {
  // A coarser unit completes only together with a finer one.
  if (index.UnitsFor(0, from) == index.UnitsFor(0, to)) return;
  const Update update{geometry, index, view, from, to, backend};
  executor.ParallelFor(int64_t{geometry.layers} * geometry.kv_heads, [&update](int64_t i) {
    const int layer = static_cast<int>(i / update.geometry.kv_heads);
    const int head = static_cast<int>(i % update.geometry.kv_heads);
    for (int level = 0; level < update.index.level_count; ++level) {
      UpdateLevel(update, level, layer, head);
    }
  });
}

}  // namespace kvstrata
