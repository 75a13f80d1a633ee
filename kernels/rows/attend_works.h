// SPDX-License-Identifier: Apache-2.0
// AttendWorks: the work items of attention for a round of query tiles, by op, and what items need
// until their ops have run.
//
// Who holds rows adds items for a tile; each writes the partial that the tile names. Attend hands
// all items of an op to the backend at once, then merges.
//
// Ownership: runs, queries and rows of items outlive Attend; what is added here is kept until
// Clear. Threads: one call at a time. Cost: memory is kept from round to round.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/rows/codec_works.h"
#include "kernels/rows/planes_works.h"
#include "kernels/rows/selection.h"

namespace kvstrata {

// The queries of a few new tokens for the heads that share a list of rows (those of one KV head, or
// one query head), in one layer, and the partial of one slice of what they attend.
struct QueryTile {
  int layer = 0, kv_head = 0;
  int32_t first_head = 0, group = 0;  // query heads
  int32_t query_heads = 0;            // query heads of the model
  int32_t queries = 0;                // query tokens
  int32_t row_token = 0;              // rows of m, l, o from a query token to the next
  int32_t dim = 0;
  float scale = 1.0f;
  const float* q = nullptr;  // query token i, head g of the group: q + i * q_token + g * dim
  int64_t q_token = 0;
  float* m = nullptr;  // [queries][row_token], as l; o the same with [dim] behind it
  float* l = nullptr;
  float* o = nullptr;
  // Partials of the tile's rows on pages, which lie before what is stored.
  int32_t pages = 0;
  // Null: nobody counts. What an op decides to read is added here.
  ReadCost* read = nullptr;

  // The same for heads [first, first + heads) of the group.
  QueryTile Heads(int32_t first, int32_t heads) const {
    QueryTile some = *this;
    some.first_head += first;
    some.group = heads;
    const int64_t floats = int64_t{first} * dim;
    some.q += floats, some.o += floats;
    some.m += first, some.l += first;
    return some;
  }
};

// Calls fn(heads, list) for the heads of a tile that share one of `lists` lists, and its number
// there; without lists once for all of it, with 0.
template <typename Fn>
void ForHeads(size_t lists, const QueryTile& tile, const Fn& fn) {
  const bool per_head = lists == static_cast<size_t>(tile.query_heads);
  const int32_t heads = per_head ? 1 : tile.group;
  for (int32_t g = 0; g < tile.group; g += heads) {
    fn(tile.Heads(g, heads), ListOf(lists, tile.first_head + g, tile.query_heads));
  }
}

class AttendWorks {
 public:
  // An item of `tile`: queries, scale and partial are set.
  template <typename Work>
  static Work ItemOf(const QueryTile& tile) {
    Work w;
    w.q = tile.q;
    w.q_token = tile.q_token;
    w.queries = tile.queries;
    w.group = tile.group;
    if constexpr (requires { w.row_token; }) w.row_token = tile.row_token;
    w.scale = tile.scale;
    w.m = tile.m;
    w.l = tile.l;
    w.o = tile.o;
    return w;
  }

  void Clear();

  // Runs of an item's own: those that are added from FirstRun() on until its Add, which takes
  // FirstRun's answer. An item without has its `runs` already.
  size_t FirstRun() const { return runs_.size(); }
  void AddRun(Run run) { runs_.push_back(run); }
  void Add(const AttendWork& work);
  void Add(AttendWork work, size_t first_run);
  void Add(AttendCoarseWork work, size_t first_run);

  // Items of ops that a codec alone has.
  template <typename Works>
  Works& Of() {
    return codec_.Of<Works>();
  }
  PlanesWorks& planes() { return planes_; }

  void Add(const MergeWork& work) { merge_.push_back(work); }

  void Attend(const Backend& backend, Executor& executor);

 private:
  static constexpr size_t kElsewhere = ~size_t{0};

  // Items point into runs_, which moves while it grows.
  void Resolve();

  std::vector<Run> runs_;
  std::vector<AttendWork> attend_;
  std::vector<AttendCoarseWork> coarse_;
  PlanesWorks planes_;
  CodecWorkList codec_;
  std::vector<MergeWork> merge_;
  std::vector<size_t> attend_run_, coarse_run_;  // where in runs_ an item's begin
};

}  // namespace kvstrata
