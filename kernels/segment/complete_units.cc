// SPDX-License-Identifier: Apache-2.0
#include "kernels/segment/complete_units.h"

#include <array>
#include <vector>

namespace kvstrata {
namespace {

struct Update {
  const Geometry& geometry;
  const IndexLayout& index;
  const SequenceView& view;
  int32_t from, to;
  const Backend& backend;
};

// One field of one level, for one (layer, KV head).
struct Field {
  int32_t field = 0;
  SummarizeWork::Kind kind = SummarizeWork::Kind::kMean;
  PagedRows source;  // tokens, or rows of the level below
};

std::vector<Field> FieldsOf(const Update& u, int level, int layer, int head) {
  using Kind = SummarizeWork::Kind;
  const IndexLayout& index = u.index;
  const PageLayout pages = PageLayout::Of(u.geometry);
  const PagedRows keys = KeysOf(u.view.pages, pages, layer, head);
  const auto below = [&](int32_t field) {
    return index.Rows(u.view.index_blocks, level - 1, layer, field, head);
  };
  std::vector<Field> fields;
  if (index.kind == IndexLayout::Kind::kMean) {
    fields.push_back({0, Kind::kMean, level == 0 ? keys : below(0)});
  } else {
    const bool extremes = index.kind == IndexLayout::Kind::kMinMax;
    fields.push_back({0, extremes ? Kind::kMinMax : Kind::kDeviation, keys});
  }
  if (index.key_mean > 0) {
    fields.push_back({index.key_mean, Kind::kMean, level == 0 ? keys : below(index.key_mean)});
  }
  if (index.value_mean >= 0) {
    const PagedRows values = ValuesOf(u.view.pages, pages, layer, head);
    fields.push_back(
        {index.value_mean, Kind::kMean, level == 0 ? values : below(index.value_mean)});
  }
  return fields;
}

SummarizeWork UnitWork(const Update& u, int level, int layer, int head, const Field& field,
                       int32_t unit) {
  const IndexLayout& index = u.index;
  const int32_t finer = level == 0 ? 1 : index.levels[level - 1].unit_tokens;
  const int32_t size = index.levels[level].unit_tokens / finer;
  SummarizeWork work;
  work.kind = field.kind;
  work.keys = field.source;
  work.rows = {unit * size, (unit + 1) * size};
  work.out = index.Row(u.view.index_blocks, level, layer, field.field, head, unit);
  work.out_dtype = index.IsCoarse(field.field) ? index.coarse_dtype() : index.dtype;
  if (field.kind != SummarizeWork::Kind::kMean) {
    work.out2 = index.Row(u.view.index_blocks, level, layer, field.field + 1, head, unit);
  }
  return work;
}

void UpdateField(const Update& u, int level, int layer, int head, const Field& field) {
  const int32_t end = u.index.UnitsFor(level, u.to);
  std::array<SummarizeWork, 32> works;
  size_t n = 0;
  for (int32_t unit = u.index.UnitsFor(level, u.from); unit < end; ++unit) {
    works[n++] = UnitWork(u, level, layer, head, field, unit);
    if (n < works.size() && unit + 1 < end) continue;
    // Inline: this already runs inside a ParallelFor.
    u.backend.summarize(works.data(), static_cast<int64_t>(n), InlineExecutor());
    n = 0;
  }
}

void UpdateLevel(const Update& u, int level, int layer, int head) {
  if (u.index.UnitsFor(level, u.from) == u.index.UnitsFor(level, u.to)) return;
  for (const Field& field : FieldsOf(u, level, layer, head)) {
    UpdateField(u, level, layer, head, field);
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
