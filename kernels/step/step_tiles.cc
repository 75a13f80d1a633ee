// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/step_tiles.h"

#include <algorithm>

namespace kvstrata {

std::vector<StepChunk> CutChunks(std::span<const StepMember> members) {
  std::vector<StepChunk> chunks;
  for (size_t i = 0; i < members.size(); ++i) {
    const StepMember& m = members[i];
    const Plan& plan = m.state->plan();
    const bool cut = m.state->prompt_tokens() < 0 && plan.selector == SelectorKind::kVote;
    for (int32_t begin = 0, end; begin < m.new_tokens; begin = end) {
      const int64_t position = int64_t{m.view.tokens} + begin;
      const int64_t next =
          cut ? (position / plan.vote.chunk + 1) * plan.vote.chunk : position + m.new_tokens;
      end = static_cast<int32_t>(std::min<int64_t>(next - m.view.tokens, m.new_tokens));
      chunks.push_back({static_cast<int>(i), begin, end - begin, {}});
    }
  }
  return chunks;
}

int32_t StoredEnd(const StepMember& member) {
  const StoredRows* const stored = member.state->stored();
  return stored == nullptr ? 0 : std::min(stored->end(), member.view.tokens);
}

// Cuts the selected history [from, history) and the new tokens [history, end) into slices. Rows
// below `from` are not on pages. The number of rows before the new tokens.
int32_t StepTiles::CutRuns(const std::vector<Run>& selected, int32_t from, int32_t history,
                           int32_t end) {
  int32_t room = 0;  // rows that the last slice can still take
  int32_t rows = 0;
  const auto add = [&](Run run) {
    run.begin = std::max(run.begin, from);
    while (run.begin < run.end) {
      if (room == 0) {
        slices_.push_back({runs_.size(), 0, run.begin, run.begin, rows});
        room = kAttendSliceRows;
      }
      const int32_t taken = std::min(room, run.end - run.begin);
      runs_.push_back({run.begin, run.begin + taken});
      ++slices_.back().run_count;
      slices_.back().end = run.begin + taken;
      run.begin += taken;
      room -= taken;
      rows += taken;
    }
  };
  int32_t last = history;  // begin of the run that goes on into the new tokens
  for (const Run& run : selected) {
    if (run.end >= history) {
      last = std::min(run.begin, history);
      break;
    }
    add(run);
  }
  add({last, end});
  return rows - (end - history);
}

void StepTiles::PlanStored(Tile* tile) {
  const StepMember& m = MemberOf(*tile);
  const Selection& selection = ChunkOf(*tile).selection;
  const StoredRows* const stored = m.state->stored();
  if (stored != nullptr) {
    stored->PlanSlices(selection, tile->first_head, StoredEnd(m), &stored_);
  }
  tile->stored = stored_.slices.size() - tile->first_stored;
  const bool has_means = stored != nullptr && stored->has_means();
  if (!has_means && !selection.coarse.empty()) tile->levels = m.state->index().level_count;
}

// Slices, stored slices and tiles of one chunk.
void StepTiles::PlanChunk(int index) {
  const StepChunk& chunk = chunks_[index];
  const StepMember& m = members_[chunk.member];
  const Geometry& g = m.state->geometry();
  const Selection& selection = chunk.selection;
  const int lists = selection.groups();
  const int tiles = lists == g.query_heads ? g.query_heads : g.kv_heads;
  const int32_t group = g.query_heads / tiles;
  const int32_t from = StoredEnd(m);
  const int32_t start = m.view.tokens + chunk.begin;
  for (int i = 0; i < tiles; ++i) {
    Tile tile;
    tile.chunk = index;
    tile.kv_head = i * group / g.group();
    tile.first_head = i * group;
    tile.group = group;
    tile.first_slice = slices_.size();
    tile.first_stored = stored_.slices.size();
    if (i < lists) {
      tile.history = CutRuns(selection.runs[i], from, start, start + chunk.count);
    } else {
      tile.history = tiles_.back().history;
      tile.first_slice = tiles_.back().first_slice;  // one list for all heads
    }
    PlanStored(&tile);
    const int32_t end = chunk.begin + chunk.count;
    for (tile.begin = chunk.begin; tile.begin < end; tile.begin += kAttendQueryTile) {
      tile.queries = std::min(kAttendQueryTile, end - tile.begin);
      tile.start = m.view.tokens + tile.begin;
      const int32_t visible = tile.visible_end();
      const auto first = slices_.begin() + static_cast<std::ptrdiff_t>(tile.first_slice);
      tile.slices = static_cast<size_t>(
          std::partition_point(first, slices_.end(),
                               [visible](const Slice& s) { return s.begin < visible; }) -
          first);
      tiles_.push_back(tile);
    }
  }
}

void StepTiles::Plan() {
  tiles_.clear();
  slices_.clear();
  runs_.clear();
  stored_.slices.clear();
  stored_.runs.clear();
  for (int i = 0; i < static_cast<int>(chunks_.size()); ++i) PlanChunk(i);
}

}  // namespace kvstrata
