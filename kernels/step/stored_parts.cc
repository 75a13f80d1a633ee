// What a step attends beside pages: packed segments, spans at two resolutions, coarse rows of what
// was not selected. Each becomes one more part of a tile's merge (docs/spec/README.md, "Merge").
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/step/step.h"

namespace kvstrata {
namespace {

// The list of `lists` that query head `head` of a tile goes by: one for all, per KV head, or per
// query head.
size_t ListOf(size_t lists, int32_t head, int32_t query_heads) {
  return lists * static_cast<size_t>(head) / static_cast<size_t>(query_heads);
}

int64_t QueryStride(const Rows& q) { return q.token_stride / static_cast<int64_t>(sizeof(float)); }

// Calls fn(first head, heads) for the parts of a tile's group that share a list.
template <typename Fn>
void ForHeads(size_t lists, int32_t query_heads, int32_t first_head, int32_t group, const Fn& fn) {
  const bool per_head = lists == static_cast<size_t>(query_heads);
  const int32_t heads = per_head ? 1 : group;
  for (int32_t g = 0; g < group; g += heads) fn(first_head + g, heads);
}

}  // namespace

// --- planning: which parts a tile has ---

// Selected rows of each segment, cut at kPackedSliceRows.
void Step::PlanPacked(const PackedStorage& packed, Tile* tile) {
  const Selection& selection = chunks_[tile->chunk].selection;
  const std::vector<Run>& runs =
      selection.runs[ListOf(selection.runs.size(), tile->first_head, geometry().query_heads)];
  const int32_t stored = StoredEnd(chunks_[tile->chunk]);
  size_t r = 0;
  for (size_t i = 0; i < packed.segments().size(); ++i) {
    Run segment = packed.segments()[i].tokens;
    segment.end = std::min(segment.end, stored);
    while (r < runs.size() && runs[r].end <= segment.begin) ++r;
    int32_t room = 0;
    for (size_t at = r; at < runs.size() && runs[at].begin < segment.end; ++at) {
      Run run{std::max(runs[at].begin, segment.begin) - segment.begin,
              std::min(runs[at].end, segment.end) - segment.begin};
      while (run.begin < run.end) {
        if (room == 0) {
          parts_.push_back({StoredPart::Kind::kPacked, static_cast<int32_t>(i), runs_.size(), 0});
          room = kPackedSliceRows;
        }
        const int32_t taken = std::min(room, run.end - run.begin);
        runs_.push_back({run.begin, run.begin + taken});
        ++parts_.back().run_count;
        run.begin += taken;
        room -= taken;
      }
    }
  }
}

// Raw rows are always on; spans are expanded (factors) or coarse (means), as the selection says.
void Step::PlanSpans(const SpanStorage& spans, Tile*) {
  for (size_t i = 0; i < spans.parts().size(); ++i) {
    const SpanStorage::Part& part = spans.parts()[i];
    const auto source = static_cast<int32_t>(i);
    if (part.raw_count > 0) parts_.push_back({StoredPart::Kind::kRawRows, source, 0, 0});
    if (part.span_count == 0) continue;
    parts_.push_back({StoredPart::Kind::kFactors, source, 0, 0});
    parts_.push_back({StoredPart::Kind::kSpanMeans, source, 0, 0});
  }
}

void Step::PlanStored(Tile* tile) {
  const SequenceState& state = *MemberOf(*tile).state;
  const Selection& selection = chunks_[tile->chunk].selection;
  if (state.packed() != nullptr) PlanPacked(*state.packed(), tile);
  if (state.spans() != nullptr) {
    PlanSpans(*state.spans(), tile);
  } else if (!selection.coarse.empty()) {
    for (int32_t level = 0; level < state.index().level_count; ++level) {
      parts_.push_back({StoredPart::Kind::kIndexMeans, level, 0, 0});
    }
  }
  tile->parts = parts_.size() - tile->first_part;
}

// --- work items of one part ---

void Step::AddStored(int layer, const Rows& q, const Tile& tile, const StoredPart& part,
                     int64_t row) {
  switch (part.kind) {
    case StoredPart::Kind::kPacked:
      return AddPacked(layer, q, tile, part, row);
    case StoredPart::Kind::kRawRows:
      return AddRawRows(layer, q, tile, part, row);
    case StoredPart::Kind::kFactors:
      return AddFactors(layer, q, tile, part, row);
    case StoredPart::Kind::kSpanMeans:
    case StoredPart::Kind::kIndexMeans:
      return AddMeans(layer, q, tile, part, row);
  }
}

// Pieces of a segment share its rotation, hence one rotated query.
void Step::AddPacked(int layer, const Rows& q, const Tile& tile, const StoredPart& part,
                     int64_t row) {
  const int32_t dim = geometry().head_dim;
  const PackedHead& head = MemberOf(tile).state->packed()->head(part.source, layer, tile.kv_head);
  const float* queries = QueriesOf(q, tile);
  const bool rotated = !packed_.empty() && rotate_.back().r == head.r_k &&
                       rotate_.back().x == queries + (tile.queries - 1) * QueryStride(q);
  const int64_t rows = int64_t{tile.queries} * tile.group;
  size_t q_at = rotated ? packed_q_.back() : rotated_.size();
  if (!rotated) {
    rotated_.resize(rotated_.size() + static_cast<size_t>(rows * dim));
    for (int32_t i = 0; i < tile.queries; ++i) {
      RotateWork w;
      w.r = head.r_k;
      w.dim = dim;
      w.x = queries + i * QueryStride(q);
      w.x_row = dim;
      w.rows = tile.group;
      rotate_.push_back(w);
      rotate_out_.push_back(q_at + static_cast<size_t>(int64_t{i} * tile.group * dim));
    }
  }
  AttendPackedWork w;
  w.k = head.keys;
  w.v = head.values;
  w.r_v = head.r_v;
  w.q_token = int64_t{tile.group} * dim;
  w.queries = tile.queries;
  w.group = tile.group;
  w.run_count = static_cast<int32_t>(part.run_count);
  w.scale = geometry().logit_scale();
  w.m = partial_m_.data() + row;
  w.l = partial_l_.data() + row;
  w.o = partial_o_.data() + row * dim;
  packed_.push_back(w);
  packed_run_.push_back(part.first_run);
  packed_q_.push_back(q_at);
}

void Step::AddRawRows(int layer, const Rows& q, const Tile& tile, const StoredPart& part,
                      int64_t row) {
  const int32_t dim = geometry().head_dim;
  const SpanStorage& spans = *MemberOf(tile).state->spans();
  AttendWork w;
  w.k = spans.RawKeys(part.source, layer, tile.kv_head);
  w.v = spans.RawValues(part.source, layer, tile.kv_head);
  w.q = QueriesOf(q, tile);
  w.q_token = QueryStride(q);
  w.queries = tile.queries;
  w.group = tile.group;
  w.position = spans.parts()[part.source].raw_count;  // every query sees every row
  w.run_count = 1;
  w.scale = geometry().logit_scale();
  w.m = partial_m_.data() + row;
  w.l = partial_l_.data() + row;
  w.o = partial_o_.data() + row * dim;
  attend_.push_back(w);
  attend_run_.push_back(runs_.size());
  runs_.push_back({0, spans.parts()[part.source].raw_count});
}

void Step::AddFactors(int layer, const Rows& q, const Tile& tile, const StoredPart& part,
                      int64_t row) {
  const Geometry& g = geometry();
  const SpanStorage& spans = *MemberOf(tile).state->spans();
  const SpanStorage::Part& range = spans.parts()[part.source];
  const Selection& selection = chunks_[tile.chunk].selection;
  const auto& lists = selection.units;
  ForHeads(lists.size(), g.query_heads, tile.first_head, tile.group,
           [&](int32_t head, int32_t heads) {
             const int64_t first = row + (head - tile.first_head);
             const size_t begin = spans_.size();
             const auto add = [&](int32_t id) {
               spans_.push_back(spans.Factors(id, layer, tile.kv_head));
             };
             if (selection.full) {
               for (int32_t u = 0; u < range.span_count; ++u) add(range.first_span + u);
             } else {
               const auto& ids = lists[ListOf(lists.size(), head, g.query_heads)];
               auto id = std::ranges::lower_bound(ids, range.first_span);
               for (; id != ids.end() && *id < range.first_span + range.span_count; ++id) add(*id);
             }
             AttendLowRankWork w;
             w.span_count = static_cast<int32_t>(spans_.size() - begin);
             w.dim = g.head_dim;
             w.q = QueriesOf(q, tile) + int64_t{head - tile.first_head} * g.head_dim;
             w.q_token = QueryStride(q);
             w.queries = tile.queries;
             w.group = heads;
             w.row_token = tile.group;
             w.scale = g.logit_scale();
             w.m = partial_m_.data() + first;
             w.l = partial_l_.data() + first;
             w.o = partial_o_.data() + first * g.head_dim;
             lowrank_.push_back(w);
             lowrank_span_.push_back(begin);
           });
}

// Coarse rows: of the spans that are not expanded, or of one level of the index.
void Step::AddMeans(int layer, const Rows& q, const Tile& tile, const StoredPart& part,
                    int64_t row) {
  const Geometry& g = geometry();
  const StepMember& m = MemberOf(tile);
  const IndexLayout& index = m.state->index();
  const auto& lists = chunks_[tile.chunk].selection.coarse;
  const bool of_spans = part.kind == StoredPart::Kind::kSpanMeans;
  AttendCoarseWork w;
  Run units{0, std::numeric_limits<int32_t>::max()};  // what the rows hold
  if (of_spans) {
    const SpanStorage& spans = *m.state->spans();
    const SpanStorage::Part& range = spans.parts()[part.source];
    units = {range.first_span, range.first_span + range.span_count};
    w.k = spans.KeyMeans(part.source, layer, tile.kv_head);
    w.v = spans.ValueMeans(part.source, layer, tile.kv_head);
    w.log_count = spans.log_length().data() + range.first_span;
  } else {
    const IndexLevel& level = index.levels[part.source];
    const auto rows = [&](int32_t field) {
      return index.Rows(m.view.index_blocks, part.source, layer, field, tile.kv_head);
    };
    w.k = rows(index.key_mean);
    w.v = rows(index.value_mean);
    w.log_count_all = std::log(static_cast<float>(level.unit_tokens));
  }
  ForHeads(
      lists.size(), g.query_heads, tile.first_head, tile.group, [&](int32_t head, int32_t heads) {
        const int64_t first = row + (head - tile.first_head);
        coarse_run_.push_back(runs_.size());
        if (!lists.empty()) {
          for (const CoarseRun& c : lists[ListOf(lists.size(), head, g.query_heads)]) {
            const Run run{std::max(c.units.begin, units.begin), std::min(c.units.end, units.end)};
            if (c.level != (of_spans ? 0 : part.source) || run.begin >= run.end) continue;
            runs_.push_back({run.begin - units.begin, run.end - units.begin});
          }
        }
        w.run_count = static_cast<int32_t>(runs_.size() - coarse_run_.back());
        w.q = QueriesOf(q, tile) + int64_t{head - tile.first_head} * g.head_dim;
        w.q_token = QueryStride(q);
        w.queries = tile.queries;
        w.group = heads;
        w.row_token = tile.group;
        w.scale = g.logit_scale();
        w.m = partial_m_.data() + first;
        w.l = partial_l_.data() + first;
        w.o = partial_o_.data() + first * g.head_dim;
        coarse_.push_back(w);
      });
}

// --- scratch that moves while items are made ---

void Step::ClearWorks() {
  attend_.clear();
  packed_.clear();
  rotate_.clear();
  lowrank_.clear();
  coarse_.clear();
  merge_.clear();
  attend_run_.clear();
  packed_run_.clear();
  coarse_run_.clear();
  packed_q_.clear();
  lowrank_span_.clear();
  rotate_out_.clear();
  rotated_.clear();
  spans_.clear();
}

void Step::ResolveWorks() {
  for (size_t i = 0; i < attend_.size(); ++i) attend_[i].runs = runs_.data() + attend_run_[i];
  for (size_t i = 0; i < packed_.size(); ++i) {
    packed_[i].runs = runs_.data() + packed_run_[i];
    packed_[i].q = rotated_.data() + packed_q_[i];
  }
  for (size_t i = 0; i < coarse_.size(); ++i) coarse_[i].runs = runs_.data() + coarse_run_[i];
  for (size_t i = 0; i < rotate_.size(); ++i) rotate_[i].out = rotated_.data() + rotate_out_[i];
  for (size_t i = 0; i < lowrank_.size(); ++i) lowrank_[i].spans = spans_.data() + lowrank_span_[i];
}

}  // namespace kvstrata
