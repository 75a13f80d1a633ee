// SPDX-License-Identifier: Apache-2.0
// The arrays of tests/golden/README.md that begin with "sekv." and describe what is stored.
#include <algorithm>
#include <string>

#include "kernels/pages/inspect_array.h"
#include "kernels/plans/sekv/lowrank.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {
namespace {

// Calls fn(layer, kv_head) in the order of the arrays.
template <typename Fn>
void EachHead(const Geometry& g, Fn fn) {
  for (int layer = 0; layer < g.layers; ++layer) {
    for (int h = 0; h < g.kv_heads; ++h) fn(layer, h);
  }
}

InspectArray SpanRuns(const SpanStorage& storage) {
  std::vector<int32_t> flat;
  for (const Run& s : storage.spans()) flat.insert(flat.end(), {s.begin, s.end});
  return ArrayOf(InspectArray::Type::kI32, {static_cast<int64_t>(storage.spans().size()), 2}, flat);
}

// All of the prompt and of what is compressed that is in no span.
InspectArray RawOf(const SelectContext& context, const SpanStorage& storage) {
  const Run all = {0, std::max(storage.end(), context.prompt_tokens)};
  const std::vector<int32_t> raw = PositionsBetween(all, storage.spans());
  return ArrayOf(InspectArray::Type::kI32, raw);
}

using MeansOf = PagedRows (SpanStorage::*)(int, int, int) const;

InspectArray Means(const SpanStorage& storage, const Geometry& g, MeansOf means) {
  std::vector<float> flat;
  EachHead(g, [&](int layer, int h) {
    for (size_t part = 0; part < storage.parts().size(); ++part) {
      const PagedRows rows = (storage.*means)(static_cast<int>(part), layer, h);
      for (int32_t u = 0; u < storage.parts()[part].span_count; ++u) {
        const auto* row = reinterpret_cast<const BF16*>(rows.Row(u));
        for (int32_t c = 0; c < g.head_dim; ++c) flat.push_back(ToFloat(row[c]));
      }
    }
  });
  const auto spans = static_cast<int64_t>(storage.spans().size());
  return ArrayOf(InspectArray::Type::kF32, {g.layers, g.kv_heads, spans, g.head_dim}, flat);
}

using SideOf = LowRankRows LowRankSpan::*;

InspectArray Ranks(const SpanStorage& storage, const Geometry& g, SideOf side) {
  const auto spans = static_cast<int32_t>(storage.spans().size());
  std::vector<int32_t> flat;
  EachHead(g, [&](int layer, int h) {
    for (int32_t s = 0; s < spans; ++s) flat.push_back((storage.Factors(s, layer, h).*side).rank);
  });
  return ArrayOf(InspectArray::Type::kI32, {g.layers, g.kv_heads, spans}, flat);
}

// Row i of a span as attention sees it.
void Reconstruct(const LowRankRows& rows, int32_t i, int32_t dim, std::vector<float>* out) {
  for (int32_t c = 0; c < dim; ++c) {
    if (rows.rank < 0) {
      out->push_back(ToFloat(rows.left[int64_t{i} * dim + c]));
      continue;
    }
    double sum = 0;
    for (int32_t j = 0; j < rows.rank; ++j) {
      sum += double{ToFloat(rows.left[int64_t{i} * rows.rank + j])} *
             double{ToFloat(rows.right[int64_t{j} * dim + c])};
    }
    out->push_back(static_cast<float>(sum));
  }
}

InspectArray Longest(const SpanStorage& storage, const Geometry& g, SideOf side) {
  const auto& spans = storage.spans();
  const auto longest =
      std::ranges::max_element(spans, {}, [](const Run& s) { return s.end - s.begin; });
  std::vector<float> flat;
  const int64_t n = longest == spans.end() ? 0 : longest->end - longest->begin;
  EachHead(g, [&](int layer, int h) {
    if (n == 0) return;
    const LowRankSpan span = storage.Factors(static_cast<int>(longest - spans.begin()), layer, h);
    for (int32_t i = 0; i < span.n; ++i) Reconstruct(span.*side, i, g.head_dim, &flat);
  });
  return ArrayOf(InspectArray::Type::kF32, {g.layers, g.kv_heads, n, g.head_dim}, flat);
}

}  // namespace

Result<InspectArray> InspectSpans(const SelectContext& context, std::string_view name) {
  const SpanStorage* const stored = SpansOf(context);
  if (stored == nullptr) {
    return FailedPrecondition("NO_SPANS", "array '" + std::string(name) +
                                              "': there are no spans yet; they are made from "
                                              "min_tokens on when all surprisals are reported");
  }
  const SpanStorage& storage = *stored;
  const Geometry& g = *context.geometry;
  if (name == "anchors") {
    return ArrayOf(InspectArray::Type::kI32, storage.anchors());
  }
  if (name == "raw") return RawOf(context, storage);
  if (name == "spans") return SpanRuns(storage);
  if (name == "k_mean") return Means(storage, g, &SpanStorage::KeyMeans);
  if (name == "v_mean") return Means(storage, g, &SpanStorage::ValueMeans);
  if (name == "k_rank") return Ranks(storage, g, &LowRankSpan::k);
  if (name == "v_rank") return Ranks(storage, g, &LowRankSpan::v);
  return Longest(storage, g, name == "k_longest" ? &LowRankSpan::k : &LowRankSpan::v);
}

}  // namespace kvstrata
