// SPDX-License-Identifier: Apache-2.0
// PackedStorage as StoredRows.
#include <algorithm>

#include "kernels/plans/mosaickv/packed.h"
#include "kernels/plans/mosaickv/rotated_works.h"

namespace kvstrata {
namespace {

// Rows that one work item scores.
constexpr int32_t kScoreTile = 2048;

}  // namespace

// Selected rows of each segment, cut at kPackedSliceRows.
void PackedStorage::PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                               StoredPlan* plan) const {
  const auto& lists = selection.runs;
  const std::vector<Run>& selected = lists[ListOf(lists.size(), first_head, geometry_.query_heads)];
  size_t r = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    Run segment = segments_[i].tokens;
    segment.end = std::min(segment.end, stored_end);
    while (r < selected.size() && selected[r].end <= segment.begin) ++r;
    int32_t room = 0;
    for (size_t at = r; at < selected.size() && selected[at].begin < segment.end; ++at) {
      Run run{std::max(selected[at].begin, segment.begin) - segment.begin,
              std::min(selected[at].end, segment.end) - segment.begin};
      while (run.begin < run.end) {
        if (room == 0) {
          plan->slices.push_back({0, static_cast<int32_t>(i), plan->runs.size(), 0});
          room = kPackedSliceRows;
        }
        const int32_t taken = std::min(room, run.end - run.begin);
        plan->runs.push_back({run.begin, run.begin + taken});
        ++plan->slices.back().run_count;
        run.begin += taken;
        room -= taken;
      }
    }
  }
}

// Extents of a segment share its rotation, hence one rotated query.
void PackedStorage::AddSlice(const Selection&, const StoredSlice& slice, std::span<const Run> runs,
                             const QueryTile& tile, AttendWorks* works) const {
  const PackedHead& own = head(slice.source, tile.layer, tile.kv_head);
  auto w = AttendWorks::ItemOf<AttendPackedWork>(tile);
  w.k = own.keys;
  w.v = own.values;
  w.r_v = own.r_v;
  w.runs = runs.data();
  w.run_count = static_cast<int32_t>(runs.size());
  w.q_token = int64_t{tile.group} * tile.dim;
  works->Of<PackedAttends>().Add(w, own.r_k,
                                 {tile.q, tile.queries, tile.group, tile.dim, tile.q_token});
}

void PackedStorage::CountReads(const HeadReads& reads, ReadCost* cost) const {
  for (size_t i = 0; i < segments_.size(); ++i) {
    const PackedHead& own = head(static_cast<int>(i), reads.layer, reads.kv_head);
    const Run range{segments_[i].tokens.begin, std::min(segments_[i].tokens.end, reads.stored_end)};
    cost->Add(RowsIn(reads.runs, range),
              static_cast<uint64_t>(own.keys.stride + own.values.stride));
  }
}

void PackedStorage::AddScores(const KeyScores& scores, ScoreWorks* works) const {
  auto& packed = works->Of<PackedScores>();
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Run segment = segments_[s].tokens;
    const Run tokens{std::max(segment.begin, scores.range.begin),
                     std::min(segment.end, scores.range.end)};
    if (tokens.begin >= tokens.end) continue;
    const PackedHead& own = head(static_cast<int>(s), scores.layer, scores.kv_head);
    for (int32_t t = tokens.begin; t < tokens.end; t += kScoreTile) {
      ScorePackedWork w;
      w.rows = own.keys;
      w.q = scores.q;
      w.queries = scores.queries;
      w.units = {t - segment.begin, std::min(t + kScoreTile, tokens.end) - segment.begin};
      w.scale = scores.scale;
      w.out = scores.out + (t - scores.range.begin);
      w.out_query = scores.out_query;
      packed.Add(w, own.r_k, {.q = w.q, .rows = w.queries, .dim = geometry_.head_dim});
    }
  }
}

int64_t PackedStorage::KeyBytes(int layer, Run range) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Run tokens = segments_[i].tokens;
    const int32_t rows = std::min(tokens.end, range.end) - std::max(tokens.begin, range.begin);
    for (int kv_head = 0; rows > 0 && kv_head < geometry_.kv_heads; ++kv_head) {
      bytes += rows * head(static_cast<int>(i), layer, kv_head).keys.stride;
    }
  }
  return bytes;
}

}  // namespace kvstrata
