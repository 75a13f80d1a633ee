// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/planes.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>

#include "base/check.h"

namespace kvstrata {

namespace {

// Where the lower runs of any group might be, until they are here: nothing is read there.
constexpr int64_t kMostLowerBytes = PlanesFormat{.dim = 256, .tokens = 256}.lower_bytes();
alignas(64) std::byte no_lower_runs[kMostLowerBytes];

// Until lower runs are here the fine set is raw rows alone (docs/spec/planes.md, rule 8). `rule`:
// what chooses; null: nothing does, everything is attended.
PlanesRule CoarseRule(const PlanesRule* rule) {
  PlanesRule coarse = {.share = 0,
                       .fine_above = std::numeric_limits<double>::infinity(),
                       .skip_below = 0,
                       .sample = 16,
                       .sinks = 0,
                       .recent = 1};
  if (rule != nullptr) coarse.skip_below = rule->skip_below, coarse.sample = rule->sample;
  return coarse;
}

}  // namespace

Result<std::unique_ptr<PlanesStorage>> PlanesStorage::Parse(const SequenceView& view,
                                                            const Geometry& geometry) {
  static std::atomic<uint64_t> parsed{0};
  auto storage = std::make_unique<PlanesStorage>(geometry);
  storage->id_ = parsed.fetch_add(1, std::memory_order_relaxed) + 1;
  std::span extents(view.extents, static_cast<size_t>(view.extent_count));
  while (!extents.empty()) {
    KVS_ASSIGN_OR_RETURN(const PlanesExtent extent, ReadPlanesExtent(&extents, geometry));
    if (extent.tokens.begin != storage->end()) {
      return DamagedExtent(extent.tokens,
                           "follows tokens that end at " + std::to_string(storage->end()));
    }
    if (storage->end() > 0 && extent.format != storage->extents_.front().format) {
      return DamagedExtent(extent.tokens, "has groups of another form than those before it");
    }
    storage->extents_.push_back(extent);
    if (extent.lower == nullptr) storage->NoteRestDue();
    storage->EndAt(extent.tokens.end);
  }
  return storage;
}

// All of it is one slice: what is chosen depends on all that is there.
void PlanesStorage::PlanSlices(const Selection&, int32_t, int32_t stored_end,
                               StoredPlan* plan) const {
  KVS_CHECK(stored_end == end());  // groups are read whole (Codec::whole_units)
  if (stored_end > 0) plan->slices.push_back({0, 0, plan->runs.size(), 0});
}

void PlanesStorage::AddSlice(const Selection& selection, const StoredSlice&, std::span<const Run>,
                             const QueryTile& tile, AttendWorks* works) const {
  KVS_CHECK(tile.row_token == tile.group);
  const int64_t head = int64_t{tile.layer} * geometry_.kv_heads + tile.kv_head;
  auto w = AttendWorks::ItemOf<AttendPlanesWork>(tile);
  w.rows.format = extents_.front().format;
  if (selection.fine) {
    w.rule = *selection.fine;
    w.tokens = selection.tokens;
  } else {
    w.rule.sinks = end();
    w.tokens = end() + 1;
  }
  if (rest_due()) w.rule = CoarseRule(selection.fine ? &w.rule : nullptr);
  PlanesWorks& planes = works->planes();
  const size_t first = planes.FirstGroup();
  for (const PlanesExtent& extent : extents_) {
    for (int32_t g = 0; g < extent.groups; ++g) {
      planes.AddGroup(extent.Upper(head, g), rest_due() ? no_lower_runs : extent.Lower(head, g));
    }
  }
  planes.Add(w, first, tile.pages, tile.read);
}

void PlanesStorage::AddScores(const KeyScores& scores, ScoreWorks* works) const {
  KVS_CHECK(!rest_due());
  const int64_t head = int64_t{scores.layer} * geometry_.kv_heads + scores.kv_head;
  for (const PlanesExtent& extent : extents_) {
    const Run tokens{std::max(extent.tokens.begin, scores.range.begin),
                     std::min(extent.tokens.end, scores.range.end)};
    if (tokens.begin >= tokens.end) continue;
    ScorePlanesWork w;
    w.format = extent.format;
    w.upper = extent.Upper(head, 0);
    w.lower = extent.Lower(head, 0);
    w.run = {tokens.begin - extent.tokens.begin, tokens.end - extent.tokens.begin};
    w.q = scores.q;
    w.queries = scores.queries;
    w.scale = scores.scale;
    w.out = scores.out + (tokens.begin - scores.range.begin);
    w.out_query = scores.out_query;
    works->Add(w);
  }
}

int64_t PlanesStorage::KeyBytes(int, Run range) const {
  const int64_t rows = std::min(range.end, end()) - std::max(range.begin, 0);
  if (rows <= 0) return 0;
  const PlanesFormat& f = extents_.front().format;
  const int64_t groups = (range.end - 1) / f.tokens - range.begin / f.tokens + 1;
  return geometry_.kv_heads * (groups * f.value_minimum() + rows * f.row_bytes() / 2);
}

Result<InspectArray> InspectPlanes(const SelectContext& context, std::string_view name) {
  const auto* const stored = static_cast<const PlanesStorage*>(context.stored);
  const bool upper = name == "upper";
  const int64_t heads = int64_t{context.geometry->layers} * context.geometry->kv_heads;
  std::vector<std::byte> bytes;
  int64_t groups = 0, size = 0;
  if (stored != nullptr && stored->end() > 0) {
    const PlanesFormat& f = stored->extents().front().format;
    groups = upper || !stored->rest_due() ? stored->end() / f.tokens : 0;
    size = upper ? f.upper_bytes() : f.lower_bytes();
  }
  for (int64_t head = 0; groups > 0 && head < heads; ++head) {
    for (const PlanesExtent& extent : stored->extents()) {
      const std::byte* const from = upper ? extent.Upper(head, 0) : extent.Lower(head, 0);
      bytes.insert(bytes.end(), from, from + extent.groups * size);
    }
  }
  return ArrayOf(InspectArray::Type::kU8,
                 {context.geometry->layers, context.geometry->kv_heads, groups, size}, bytes);
}

// A layer over 32K tokens takes .35 of `full`'s time on two cores (bench/ops_bench), one over 128K
// .43 on an H200 (bench/cuda/planes_bench). On a GPU the choice is between planes in full and by
// the rule, which starts a kernel more.
CodecCost PlanesCost(const Plan&, const Geometry&) { return {.35, 2, 570}; }

}  // namespace kvstrata
