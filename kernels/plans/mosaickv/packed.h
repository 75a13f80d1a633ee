// SPDX-License-Identifier: Apache-2.0
// Codec packed: rotated, per-vector sparse keys and values (docs/spec/mosaickv.md; paper 4 and 5).
//
// PackedStorage is the reading side: all kPackedSegment extents of a sequence, parsed. A segment is
// final (its own rotations and strategies) or temporary (those of the last final segment before it:
// `plan_begin` in the extent names that segment). Either may consist of several extents that follow
// each other, beginning at multiples of every block size from the segment's begin on: of a final
// one the first holds the rotations, and the others name it. Bytes: packed_layout.h,
// docs/extents.md. The writing side is the Recompressor of codec.h.
//
// Threads: immutable after Parse. Ownership: points into the extents; valid as long as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/codec/extent.h"
#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/rows/select_context.h"
#include "kernels/rows/stored_rows.h"

namespace kvstrata {

// One (layer, KV head) of one extent.
struct PackedHead {
  const float* r_k = nullptr;  // rotations [head_dim][head_dim], rows are the new axes
  const float* r_v = nullptr;
  PackedRows keys, values;             // row i is token begin + i
  PackedRows blocks;                   // row j is block j of this extent
  int32_t block = 0;                   // tokens of a block; the last may be short
  const float* eigenvalues = nullptr;  // those of K^T K [head_dim], descending; null in later ones
};

class PackedStorage final : public StoredRows {
 public:
  struct Segment {
    Run tokens;
    bool final = false;
    int32_t plan_begin = 0;
    // What max_loss is held against (loss_limit.h), and what a strategy lost that was not taken; 0:
    // not measured, none.
    double worst_loss = 0, refused_loss = 0;
  };

  explicit PackedStorage(const Geometry& geometry) : StoredRows(false), geometry_(geometry) {}
  // DATA_LOSS EXTENT_INVALID.
  static Result<std::unique_ptr<PackedStorage>> Parse(const SequenceView& view,
                                                      const Geometry& geometry);

  // Rows from end() on are raw: the update buffer. A slice is rows of one segment.
  void PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                  StoredPlan* plan) const override;
  void AddSlice(const Selection& selection, const StoredSlice& slice, std::span<const Run> runs,
                const QueryTile& tile, AttendWorks* works) const override;
  void CountReads(const HeadReads& reads, ReadCost* cost) const override;
  // Blocks are runs.
  void AppendUnits(std::span<const int32_t>, std::vector<Run>*) const override {}
  void AddScores(const KeyScores& scores, ScoreWorks* works) const override;
  int64_t KeyBytes(int layer, Run range) const override;

  // One per extent, ascending, without gaps from position 0 on; those of one segment have the same
  // plan_begin and are all final or all not.
  const std::vector<Segment>& segments() const { return segments_; }
  const PackedHead& head(int segment, int layer, int kv_head) const {
    return heads_[Index(segment, layer) + static_cast<size_t>(kv_head)];
  }
  // Blocks of one (layer, head) over all segments: id -> tokens. Ids count from position 0.
  int32_t BlockCount(int layer, int kv_head) const;
  int64_t bytes() const { return bytes_; }
  // The most elements that a vector keeps.
  int32_t keep_max() const { return keep_max_; }
  // Names this Parse in this process; never 0.
  uint64_t id() const { return id_; }

 private:
  size_t Index(int segment, int layer) const {
    return static_cast<size_t>((int64_t{segment} * geometry_.layers + layer) * geometry_.kv_heads);
  }

  const Geometry geometry_;
  std::vector<Segment> segments_;
  std::vector<PackedHead> heads_;  // [segments][layers][kv_heads]
  int64_t bytes_ = 0;
  int32_t keep_max_ = 0;
  uint64_t id_ = 0;
};

// Null where rows are not stored so.
inline const PackedStorage* PackedOf(const StoredRows* stored) {
  return dynamic_cast<const PackedStorage*>(stored);
}
inline const PackedStorage* PackedOf(const SelectContext& context) {
  return PackedOf(context.stored);
}

// What a sequence's status says of its codec: where max_loss made it take a milder strategy than
// the plan's, what that lost and what is lost now; where packing ends before `due`, up to which
// tokens are to be packed; else "". `packed` null: nothing is packed (yet).
std::string PackedText(const Plan& plan, int32_t due, const PackedStorage* packed);

// Arrays of tests/golden/README.md: "eigenvalues", "rotated_rows" and "packed_rows" (first segment,
// layer 0, head 0; rotated rows need the raw pages), "segments" (flat start, stop, final),
// "strategies" [segments][layers * kv_heads][3] (extents of a segment are one), "packed_bytes" i32
// pairs are not.
Result<InspectArray> InspectPacked(const SelectContext& context, std::string_view name);

}  // namespace kvstrata
