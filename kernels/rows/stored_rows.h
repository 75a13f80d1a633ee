// SPDX-License-Identifier: Apache-2.0
// StoredRows: the reading side of a codec: what a sequence's extents hold, parsed, as the CPU's
// steps and selectors read it. Rows below end() are read here, rows from there on on pages.
//
// A step asks for the slices of a selection (PlanSlices), then for the work items of each slice and
// tile of queries (AddSlice): every slice is one more partial of the tile's merge
// (docs/spec/README.md, "Merge"). A selector asks for scores of keys. What a codec's own selectors
// need beyond that, its class has.
//
// Implementations: packed.h, lowrank.h, planes.h, and in tests toy_codec.h; one row each in
// codec_rows.cc says how they are parsed. One conformance suite for all
// (tests/kernels/stored_rows_test.cc).
//
// Threads: immutable; any. Ownership: points into the extents; valid as long as they are. Cost: a
// call a slice and tile, or a KV head; nothing here is called row by row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rows/attend_works.h"
#include "kernels/rows/score_works.h"
#include "kernels/rows/selection.h"

namespace kvstrata {

// What a group of heads attends of what is stored as one partial of its merge.
struct StoredSlice {
  int32_t kind = 0, source = 0;         // the codec's own
  size_t first_run = 0, run_count = 0;  // runs of the plan
};

// Slices of several tiles, and their runs.
struct StoredPlan {
  std::vector<StoredSlice> slices;
  std::vector<Run> runs;

  std::span<const Run> RunsOf(const StoredSlice& slice) const {
    return std::span(runs).subspan(slice.first_run, slice.run_count);
  }
};

// New tokens [start, start + count) of one sequence, which attend to each other causally and to the
// history as selected.
struct ReadChunk {
  const Selection* selection = nullptr;
  int32_t start = 0, count = 0;
};

// What the queries of one KV head attend in one layer.
struct HeadReads {
  int layer = 0, kv_head = 0;
  std::span<const ReadChunk> chunks;
  std::span<const Run> runs;  // all chunks': positions that some query attends one by one
  int32_t stored_end = 0;     // those below it are read here
};

// Scores that are wanted of the keys of one (layer, KV head).
struct KeyScores {
  int layer = 0, kv_head = 0;
  Run range;                 // positions, all below end()
  const float* q = nullptr;  // [queries][head_dim]
  int32_t queries = 0;
  float scale = 1.0f;
  float* out =
      nullptr;  // scale * q.k of query i and position t: out[i * out_query + t - range.begin]
  int64_t out_query = 0;
};

class StoredRows {
 public:
  virtual ~StoredRows() = default;

  int32_t end() const { return end_; }
  // Whether what a selection attends as coarse rows are means that lie here; else they are those of
  // the plan's index.
  bool has_means() const { return has_means_; }
  // Whether some of it is on its way from a tier: rows are read as far as they are here.
  bool rest_due() const { return rest_due_; }

  // Adds the slices that query heads from `first_head` on read of a selection, and that share a
  // list of it. Positions below `stored_end` <= end() are read here.
  virtual void PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                          StoredPlan* plan) const = 0;

  // Adds the items of one slice for a tile, which write its whole partial. runs: the slice's, of a
  // plan that outlives the items.
  virtual void AddSlice(const Selection& selection, const StoredSlice& slice,
                        std::span<const Run> runs, const QueryTile& tile,
                        AttendWorks* works) const = 0;

  // Adds what those slices read: a row that several queries attend once. What an op decides is not
  // known yet; it is added to QueryTile::read.
  virtual void CountReads(const HeadReads& reads, ReadCost* cost) const = 0;

  // Appends the positions of a selection's chosen units that are not in its runs.
  virtual void AppendUnits(std::span<const int32_t> units, std::vector<Run>* runs) const = 0;

  // Adds the items that score keys. REQUIRES: !rest_due().
  virtual void AddScores(const KeyScores& scores, ScoreWorks* works) const = 0;

  // Bytes that scoring the keys of `range` reads in a layer, of all KV heads.
  virtual int64_t KeyBytes(int layer, Run range) const = 0;

 protected:
  explicit StoredRows(bool has_means) : has_means_(has_means) {}
  void EndAt(int32_t end) { end_ = end; }
  void NoteRestDue() { rest_due_ = true; }

 private:
  const bool has_means_;
  int32_t end_ = 0;
  bool rest_due_ = false;
};

}  // namespace kvstrata
