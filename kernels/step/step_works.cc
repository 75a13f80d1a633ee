// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/step_works.h"

#include <algorithm>
#include <cmath>

#include "kernels/step/dense_rows.h"

namespace kvstrata {
namespace {

// Outputs of partials in flight, in floats.
constexpr int64_t kPartialFloats = int64_t{8} << 20;

// Where the tile's queries and the slice's rows stand for rotary embedding.
void PlaceRows(const StepTiles& tiles, const Tile& tile, const Slice& slice, AttendWork* work) {
  const SequenceState& state = *tiles.MemberOf(tile).state;
  work->rotary = state.rotary();
  work->query_place = work->position;
  if (!state.plan().compact) return;
  work->query_place = tile.history + tile.begin - tiles.ChunkOf(tile).begin;
  work->row_place = slice.rank;
}

// `next` becomes the tile's next partial.
void NextPartial(const Tile& tile, QueryTile* next) {
  next->m += tile.rows();
  next->l += tile.rows();
  next->o += int64_t{tile.rows()} * next->dim;
}

}  // namespace

// One work item a slice, of rows on pages.
void StepWorks::AddSlices(const StepTiles& tiles, const Tile& tile, QueryTile* next) {
  const StepMember& m = tiles.MemberOf(tile);
  const PageLayout layout = PageLayout::Of(m.state->geometry());
  const PagedRows k = KeysOf(m.view.pages, layout, next->layer, tile.kv_head);
  const PagedRows v = ValuesOf(m.view.pages, layout, next->layer, tile.kv_head);
  const int32_t end = tile.visible_end();
  for (const Slice& slice : tiles.SlicesOf(tile)) {
    auto w = AttendWorks::ItemOf<AttendWork>(*next);
    w.k = k;
    w.v = v;
    w.position = tile.start;
    PlaceRows(tiles, tile, slice, &w);
    const std::span<const Run> runs = tiles.RunsOf(slice);
    if (slice.end <= end) {
      w.runs = runs.data();
      w.run_count = static_cast<int32_t>(runs.size());
      works_.Add(w);
    } else {  // rows behind the last query would be read for nothing
      const size_t first = works_.FirstRun();
      for (size_t r = 0; r < runs.size() && runs[r].begin < end; ++r) {
        works_.AddRun({runs[r].begin, std::min(runs[r].end, end)});
      }
      works_.Add(w, first);
    }
    NextPartial(tile, next);
  }
}

// Coarse rows of what was not selected, a partial a level of the index.
void StepWorks::AddLevels(const StepTiles& tiles, const Tile& tile, QueryTile* next) {
  const StepMember& m = tiles.MemberOf(tile);
  const IndexLayout& index = m.state->index();
  const auto& lists = tiles.ChunkOf(tile).selection.coarse;
  for (int32_t level = 0; level < tile.levels; ++level) {
    const auto rows = [&](int32_t field) {
      return index.Rows(m.view.index_blocks, level, next->layer, field, tile.kv_head);
    };
    const PagedRows k = rows(index.key_mean), v = rows(index.value_mean);
    const auto log_count = std::log(static_cast<float>(index.levels[level].unit_tokens));
    ForHeads(lists.size(), *next, [&](const QueryTile& heads, size_t list) {
      auto w = AttendWorks::ItemOf<AttendCoarseWork>(heads);
      w.k = k;
      w.v = v;
      w.log_count_all = log_count;
      const size_t first = works_.FirstRun();
      for (const CoarseRun& c : lists[list]) {
        if (c.level != level || c.units.begin >= c.units.end) continue;
        works_.AddRun(c.units);
      }
      works_.Add(w, first);
    });
    NextPartial(tile, next);
  }
}

void StepWorks::AddMerge(const Tile& tile, const QueryTile& first, int64_t token,
                         const LayerTensors& t) {
  MergeWork w;
  w.m = first.m;
  w.l = first.l;
  w.o = first.o;
  w.parts = tile.partials();
  w.rows = tile.rows();
  w.group = tile.group;
  w.dim = first.dim;
  w.out = t.out + token * t.out_token + int64_t{tile.first_head} * first.dim;
  w.out_token = t.out_token;
  w.lse = t.lse == nullptr ? nullptr : t.lse + token * t.query_heads + tile.first_head;
  w.lse_token = t.query_heads;
  works_.Add(w);
}

void StepWorks::RunTiles(const StepTiles& tiles, std::span<const Tile> round,
                         std::span<const int32_t> first_row, const LayerTensors& t) {
  const Geometry& g = tiles.MemberOf(round[0]).state->geometry();
  int64_t rows = 0;
  for (const Tile& tile : round) rows += tile.partial_rows();
  float* const m = ReserveFloats(&partial_m_, rows);
  float* const l = ReserveFloats(&partial_l_, rows);
  float* const o = ReserveFloats(&partial_o_, rows * g.head_dim);
  works_.Clear();
  int64_t row = 0;
  for (const Tile& tile : round) {
    const int member = tiles.ChunkOf(tile).member;
    const int64_t token = first_row[member] + tile.begin;
    const QueryTile first{t.layer,
                          tile.kv_head,
                          tile.first_head,
                          tile.group,
                          g.query_heads,
                          tile.queries,
                          tile.group,
                          g.head_dim,
                          g.logit_scale(),
                          t.q + token * t.q_token + int64_t{tile.first_head} * g.head_dim,
                          t.q_token,
                          m + row,
                          l + row,
                          o + row * g.head_dim,
                          static_cast<int32_t>(tile.slices),
                          tile.begin == tiles.ChunkOf(tile).begin ? &t.reads[member] : nullptr};
    QueryTile next = first;
    AddSlices(tiles, tile, &next);
    for (const StoredSlice& stored : tiles.StoredOf(tile)) {
      tiles.MemberOf(tile).state->stored()->AddSlice(tiles.ChunkOf(tile).selection, stored,
                                                     tiles.RunsOf(stored), next, &works_);
      NextPartial(tile, &next);
    }
    AddLevels(tiles, tile, &next);
    AddMerge(tile, first, token, t);
    row += tile.partial_rows();
  }
  works_.Attend(backend_, executor_);
}

void StepWorks::Attend(const StepTiles& tiles, std::span<const int32_t> first_row,
                       const LayerTensors& t) {
  const std::span<const Tile> all = tiles.tiles();
  const int32_t dim = tiles.MemberOf(all[0]).state->geometry().head_dim;
  for (size_t first = 0, last; first < all.size(); first = last) {
    int64_t floats = 0;
    for (last = first; last < all.size(); ++last) {
      floats += all[last].partial_rows() * dim;
      if (floats > kPartialFloats && last > first) break;
    }
    RunTiles(tiles, all.subspan(first, last - first), first_row, t);
  }
}

}  // namespace kvstrata
