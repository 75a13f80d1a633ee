#include "kernels/step/stored_parts.h"

#include <algorithm>

namespace kvstrata {
namespace {

// --- planning: which parts a tile has ---

// Selected rows of each segment, cut at kPackedSliceRows.
void PlanPacked(const PackedStorage& packed, const std::vector<Run>& selected, int32_t stored_end,
                StoredPlan* plan) {
  size_t r = 0;
  for (size_t i = 0; i < packed.segments().size(); ++i) {
    Run segment = packed.segments()[i].tokens;
    segment.end = std::min(segment.end, stored_end);
    while (r < selected.size() && selected[r].end <= segment.begin) ++r;
    int32_t room = 0;
    for (size_t at = r; at < selected.size() && selected[at].begin < segment.end; ++at) {
      Run run{std::max(selected[at].begin, segment.begin) - segment.begin,
              std::min(selected[at].end, segment.end) - segment.begin};
      while (run.begin < run.end) {
        if (room == 0) {
          plan->parts.push_back(
              {StoredPart::Kind::kPacked, static_cast<int32_t>(i), plan->runs.size(), 0});
          room = kPackedSliceRows;
        }
        const int32_t taken = std::min(room, run.end - run.begin);
        plan->runs.push_back({run.begin, run.begin + taken});
        ++plan->parts.back().run_count;
        run.begin += taken;
        room -= taken;
      }
    }
  }
}

// Raw rows are always on; spans are expanded (factors) or coarse (means), as the selection says.
void PlanSpans(const SpanStorage& spans, StoredPlan* plan) {
  for (size_t i = 0; i < spans.parts().size(); ++i) {
    const SpanStorage::Part& part = spans.parts()[i];
    const auto source = static_cast<int32_t>(i);
    if (part.raw_count > 0) plan->parts.push_back({StoredPart::Kind::kRawRows, source, 0, 0});
    if (part.span_count == 0) continue;
    plan->parts.push_back({StoredPart::Kind::kFactors, source, 0, 0});
    plan->parts.push_back({StoredPart::Kind::kSpanMeans, source, 0, 0});
  }
}

// --- work items of one part ---

// Pieces of a segment share its rotation, hence one rotated query.
void AddPacked(const PackedStorage& packed, const StoredPart& part, std::span<const Run> runs,
               const QueryTile& tile, AttendWorks* works) {
  const PackedHead& head = packed.head(part.source, tile.layer, tile.kv_head);
  auto w = AttendWorks::ItemOf<AttendPackedWork>(tile);
  w.k = head.keys;
  w.v = head.values;
  w.r_v = head.r_v;
  w.runs = runs.data();
  w.run_count = static_cast<int32_t>(runs.size());
  works->AddRotated(w, head.r_k, tile);
}

void AddRawRows(const SpanStorage& spans, const StoredPart& part, const QueryTile& tile,
                AttendWorks* works) {
  const int32_t rows = spans.parts()[part.source].raw_count;
  auto w = AttendWorks::ItemOf<AttendWork>(tile);
  w.k = spans.RawKeys(part.source, tile.layer, tile.kv_head);
  w.v = spans.RawValues(part.source, tile.layer, tile.kv_head);
  w.position = rows;  // every query sees every row
  const size_t first = works->FirstRun();
  works->AddRun({0, rows});
  works->Add(w, first);
}

void AddFactors(const SpanStorage& spans, const Selection& selection, int32_t query_heads,
                const StoredPart& part, const QueryTile& tile, AttendWorks* works) {
  const SpanStorage::Part& range = spans.parts()[part.source];
  const auto& lists = selection.units;
  ForHeads(lists.size(), query_heads, tile, [&](const QueryTile& heads) {
    const size_t first = works->FirstSpan();
    const auto add = [&](int32_t id) {
      works->AddSpan(spans.Factors(id, tile.layer, tile.kv_head));
    };
    if (selection.full) {
      for (int32_t u = 0; u < range.span_count; ++u) add(range.first_span + u);
    } else {
      const auto& ids = lists[ListOf(lists.size(), heads.first_head, query_heads)];
      auto id = std::ranges::lower_bound(ids, range.first_span);
      for (; id != ids.end() && *id < range.first_span + range.span_count; ++id) add(*id);
    }
    auto w = AttendWorks::ItemOf<AttendLowRankWork>(heads);
    w.dim = tile.dim;
    works->Add(w, first);
  });
}

// Coarse rows of the spans that are not expanded.
void AddSpanMeans(const SpanStorage& spans, const Selection& selection, int32_t query_heads,
                  const StoredPart& part, const QueryTile& tile, AttendWorks* works) {
  const SpanStorage::Part& range = spans.parts()[part.source];
  const auto& lists = selection.coarse;
  ForHeads(lists.size(), query_heads, tile, [&](const QueryTile& heads) {
    auto w = AttendWorks::ItemOf<AttendCoarseWork>(heads);
    w.k = spans.KeyMeans(part.source, tile.layer, tile.kv_head);
    w.v = spans.ValueMeans(part.source, tile.layer, tile.kv_head);
    w.log_count = spans.log_length().data() + range.first_span;
    const size_t first = works->FirstRun();
    if (!lists.empty()) {
      for (const CoarseRun& c : lists[ListOf(lists.size(), heads.first_head, query_heads)]) {
        const Run run{std::max(c.units.begin, range.first_span) - range.first_span,
                      std::min(c.units.end - range.first_span, range.span_count)};
        if (c.level == 0 && run.begin < run.end) works->AddRun(run);
      }
    }
    works->Add(w, first);
  });
}

}  // namespace

void PlanStored(const SequenceState& state, const Selection& selection, int32_t first_head,
                int32_t stored_end, StoredPlan* plan) {
  if (state.packed() != nullptr) {
    const auto& lists = selection.runs;
    const size_t list = ListOf(lists.size(), first_head, state.geometry().query_heads);
    PlanPacked(*state.packed(), lists[list], stored_end, plan);
  }
  if (state.spans() != nullptr) PlanSpans(*state.spans(), plan);
}

void AddStored(const SequenceState& state, const Selection& selection, const StoredPart& part,
               std::span<const Run> runs, const QueryTile& tile, AttendWorks* works) {
  const int32_t query_heads = state.geometry().query_heads;
  switch (part.kind) {
    case StoredPart::Kind::kPacked:
      return AddPacked(*state.packed(), part, runs, tile, works);
    case StoredPart::Kind::kRawRows:
      return AddRawRows(*state.spans(), part, tile, works);
    case StoredPart::Kind::kFactors:
      return AddFactors(*state.spans(), selection, query_heads, part, tile, works);
    case StoredPart::Kind::kSpanMeans:
      return AddSpanMeans(*state.spans(), selection, query_heads, part, tile, works);
  }
}

}  // namespace kvstrata
