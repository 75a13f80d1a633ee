// SPDX-License-Identifier: Apache-2.0
// Selection: what a selector chose (docs/plans.md, second axis), as steps, codecs and the GPU's
// kernels read it.
//
// Plain data; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// Units of one level of the plan's index (0 the finest), or spans (level 0), each attended as one
// row of means.
struct CoarseRun {
  int32_t level = 0;
  Run units;
  bool operator==(const CoarseRun&) const = default;
};

// What one (sequence, layer) attends to in one step.
struct Selection {
  int32_t tokens = 0;  // N, the query's own token included
  bool full = true;    // everything; `runs` is then one run [0, N)
  // Positions, ascending disjoint runs, always-on sets included: one list for all heads, one per KV
  // head, or one per query head. Codec lowrank: the raw rows alone (one list); what is expanded is
  // in `units`.
  std::vector<std::vector<Run>> runs;
  // Ids of the chosen units, ascending, grouped like `runs` (tests/golden/README.md "units"): quest
  // the pages chosen beside the always-on ones; cascade the whole page table; empty for full and
  // window.
  std::vector<std::vector<int32_t>> units;
  // Units attended as one coarse row each, ascending by position, grouped like `units`; empty when
  // the rest is dropped. Rows come from the plan's index (index.rest), or from the spans' means.
  std::vector<std::vector<CoarseRun>> coarse;
  // How what codec planes holds is read; none: all of it by all planes.
  std::optional<PlanesRule> fine;
  int64_t scored_bytes = 0;  // that selecting read; 0 when an earlier selection was reused

  int groups() const { return static_cast<int>(runs.size()); }
  static Selection Full(int32_t n);
  // The same, reusing the memory of what was there: a decode step selects once a layer.
  void SetFull(int32_t n);
  // `group_count` empty lists over n tokens, not full; reuses memory.
  void Reset(int32_t n, int group_count);
};

// A selection as lists: 1, kv_heads or query_heads groups of heads.
int GroupsOf(const Selection& selection);
// Ids of the units of a group, ascending; empty for full and window.
std::span<const int32_t> UnitsOf(const Selection& selection, int group);

// The list of `lists` that a query head goes by: one for all, per KV head, or per query head.
inline size_t ListOf(size_t lists, int32_t head, int32_t query_heads) {
  return lists * static_cast<size_t>(head) / static_cast<size_t>(query_heads);
}
// Those that the queries of a KV head go by.
template <typename List>
std::span<const List> ListsOf(const std::vector<List>& lists, int kv_head, int kv_heads) {
  const auto all = std::span(lists);
  if (all.size() <= 1) return all;
  const size_t own = all.size() / static_cast<size_t>(kv_heads);
  return all.subspan(static_cast<size_t>(kv_head) * own, own);
}

// Positions of `runs`, which are disjoint, inside `range`.
inline uint64_t RowsIn(std::span<const Run> runs, Run range) {
  int64_t rows = 0;
  for (const Run& run : runs) {
    rows += std::max(std::min(run.end, range.end) - std::max(run.begin, range.begin), 0);
  }
  return static_cast<uint64_t>(rows);
}

// Union of runs given in any order: ascending, disjoint, adjacent ones joined, empty ones gone.
std::vector<Run> Normalize(std::vector<Run> runs);

// Adds a run that begins at or after the last one's begin; joins it where they touch.
inline void AppendRun(Run run, std::vector<Run>* runs) {
  if (run.begin >= run.end) return;
  if (runs->empty() || run.begin > runs->back().end) {
    runs->push_back(run);
  } else if (run.end > runs->back().end) {
    runs->back().end = run.end;
  }
}

}  // namespace kvstrata
