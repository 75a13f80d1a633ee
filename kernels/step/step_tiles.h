// SPDX-License-Identifier: Apache-2.0
// StepTiles: what the chunks of a batch attend in one layer, cut into tiles: the new tokens of one
// chunk, at most kAttendQueryTile, for the heads that share a list of rows. A tile's attention is
// merged from the partials of its slices (rows on pages, kAttendSliceRows each), then of what a
// codec stores, then of its index's levels. All cuts go by length.
//
// Ownership: borrows the batch and its chunks, whose selections Plan reads. What it answers is
// valid until the next Plan. Threads: one call at a time. Cost of Plan: the selections' runs once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rows/stored_rows.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

// New tokens of one member that attend the same selection of what lies before them.
struct StepChunk {
  int member = 0;
  int32_t begin = 0, count = 0;  // among the member's new tokens
  Selection selection;
};

// A prompt is cut at multiples of vote.chunk from the sequence's start where its selector selects
// in prefill (ADR 3); everything else is one chunk a member. In order.
std::vector<StepChunk> CutChunks(std::span<const StepMember> members);

// Rows below this are attended where a codec holds them, others on pages. If a prompt was opened
// without its raw pages, a segment may reach into the new tokens.
int32_t StoredEnd(const StepMember& member);

// Some of the positions that a group of heads attends on pages.
struct Slice {
  size_t first_run = 0, run_count = 0;
  int32_t begin = 0, end = 0;  // first position, and one past the last
  int32_t rank = 0;            // the first row's in the list
};

struct Tile {
  int chunk = 0, kv_head = 0;
  int32_t first_head = 0, group = 0;    // query heads
  int32_t begin = 0, queries = 0;       // among the member's new tokens
  int32_t start = 0;                    // position of the first of them
  int32_t history = 0;                  // rows of the list before the chunk's first new token
  size_t first_slice = 0, slices = 0;   // those that some query sees
  size_t first_stored = 0, stored = 0;  // slices of what a codec stores
  int32_t levels = 0;  // those of the index, whose means of what was not selected are attended

  // Positions that the last query sees end here.
  int32_t visible_end() const { return start + queries; }
  int32_t rows() const { return queries * group; }  // rows of a partial
  int32_t partials() const { return static_cast<int32_t>(slices + stored) + levels; }
  int64_t partial_rows() const { return int64_t{partials()} * rows(); }
};

class StepTiles {
 public:
  StepTiles(std::span<const StepMember> members, std::span<const StepChunk> chunks)
      : members_(members), chunks_(chunks) {}

  void Plan();

  std::span<const Tile> tiles() const { return tiles_; }
  const StepChunk& ChunkOf(const Tile& tile) const { return chunks_[tile.chunk]; }
  const StepMember& MemberOf(const Tile& tile) const { return members_[ChunkOf(tile).member]; }
  std::span<const Slice> SlicesOf(const Tile& tile) const {
    return std::span(slices_).subspan(tile.first_slice, tile.slices);
  }
  std::span<const Run> RunsOf(const Slice& slice) const {
    return std::span(runs_).subspan(slice.first_run, slice.run_count);
  }
  std::span<const StoredSlice> StoredOf(const Tile& tile) const {
    return std::span(stored_.slices).subspan(tile.first_stored, tile.stored);
  }
  std::span<const Run> RunsOf(const StoredSlice& slice) const { return stored_.RunsOf(slice); }

 private:
  int32_t CutRuns(const std::vector<Run>& selected, int32_t from, int32_t history, int32_t end);
  void PlanStored(Tile* tile);
  void PlanChunk(int chunk);

  const std::span<const StepMember> members_;
  const std::span<const StepChunk> chunks_;
  std::vector<Tile> tiles_;
  std::vector<Slice> slices_;
  std::vector<Run> runs_;  // runs of the slices
  StoredPlan stored_;
};

}  // namespace kvstrata
