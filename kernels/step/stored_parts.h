// What a step attends beside pages: packed segments, spans at two resolutions. Each becomes one
// more part of a tile's merge (docs/spec/README.md, "Merge").
//
// Pure; any thread.
#ifndef KVSTRATA_KERNELS_STEP_STORED_PARTS_H_
#define KVSTRATA_KERNELS_STEP_STORED_PARTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attend_works.h"
#include "kernels/step/sequence_state.h"

namespace kvstrata {

// What a group of heads attends in one extent.
struct StoredPart {
  enum class Kind : uint8_t { kPacked, kRawRows, kFactors, kSpanMeans };
  Kind kind = Kind::kPacked;
  int32_t source = 0;                   // packed: segment; spans: part
  size_t first_run = 0, run_count = 0;  // kPacked: local rows
};

// Parts of several tiles, and their runs.
struct StoredPlan {
  std::vector<StoredPart> parts;
  std::vector<Run> runs;

  std::span<const Run> RunsOf(const StoredPart& part) const {
    return std::span(runs).subspan(part.first_run, part.run_count);
  }
};

// The list of `lists` that a query head goes by: one for all, per KV head, or per query head.
inline size_t ListOf(size_t lists, int32_t head, int32_t query_heads) {
  return lists * static_cast<size_t>(head) / static_cast<size_t>(query_heads);
}

// Calls fn(tile) for the parts of a tile's group that share a list.
template <typename Fn>
void ForHeads(size_t lists, int32_t query_heads, const QueryTile& tile, const Fn& fn) {
  const bool per_head = lists == static_cast<size_t>(query_heads);
  const int32_t heads = per_head ? 1 : tile.group;
  for (int32_t g = 0; g < tile.group; g += heads) fn(tile.Heads(g, heads));
}

// Adds the parts of heads from `first_head` on, which share a list. Positions below `stored_end`
// are read here.
void PlanStored(const SequenceState& state, const Selection& selection, int32_t first_head,
                int32_t stored_end, StoredPlan* plan);

// Adds the items of one part for a tile. runs: the part's.
void AddStored(const SequenceState& state, const Selection& selection, const StoredPart& part,
               std::span<const Run> runs, const QueryTile& tile, AttendWorks* works);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_STORED_PARTS_H_
