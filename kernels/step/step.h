// A step: one forward pass over a batch of sequences (docs/design.md, "Two roads, one step"). Both
// roads run this code, the client library on mapped pages and the daemon for remote callers, so
// both give the same bits.
//
//   begin (constructor) -> per layer Append, [Select,] Attend -> End
//
// Threads: one call at a time for a Step and for the states in it; different Steps are independent.
#ifndef KVSTRATA_KERNELS_STEP_STEP_H_
#define KVSTRATA_KERNELS_STEP_STEP_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/step/step_batch.h"

namespace kvstrata {

class ShadowAttention;  // shadow_attention.h

class Step : public StepBatch {
 public:
  // Catches every member up: its index, for all layers, and its selector.
  // REQUIRES: as StepBatch; states and views outlive the Step.
  Step(std::vector<StepMember> members, const Backend& backend, Executor& executor);
  ~Step();

  // k, v [sum of new tokens][kv_heads][head_dim].
  void Append(int layer, const Rows& k, const Rows& v);

  // Fixes the selection of `layer` from q [sum of new tokens][query_heads][head_dim].
  // REQUIRES: the layer was appended (a prompt chunk selects from the tokens before it).
  void Select(int layer, const Rows& q);
  // Fixes it to `selection`, of a Step that has one member and no prompt to cut.
  void Choose(int layer, Selection selection);

  // Attention of the new tokens over what Select chose (it selects first if Select was not called
  // for this layer): the history as selected for the first new token, the new tokens causally. A
  // prompt is cut at multiples of vote.chunk, each chunk with a selection of its own, where the
  // selector selects in prefill (ADR 3).
  // Models with keys stored before rotary embedding pass q before it as well, everywhere; a token's
  // rows and its query stand at their positions, or, with plan.compact, at their ranks among the
  // rows that it attends: h rows of history at 0 .. h - 1, new token i and its query at h + i.
  // out like q; lse (may be null) [sum of new tokens][query_heads], natural log of the sum of exp
  // of the scaled scores.
  void Attend(int layer, const Rows& q, const MutableRows& out, float* lse);

  // Measures from now on what each Attend of `member` loses (shadow_attention.h); answers stay the
  // same bits. REQUIRES: Decodes(member), before its first Attend.
  void Shadow(int member);
  // Null: Shadow was not called for it.
  const ShadowAttention* shadow(int member) const;

  // All layers hold the new tokens: the states advance. The Step is over. A Step that is destroyed
  // without End leaves its states as they were.
  void End();

  // The selection of the last layer selected or attended; of a member's last chunk.
  const Selection& selection(int member) const { return chunks_[last_chunk_[member]].selection; }
  int Groups(int member) const { return GroupsOf(selection(member)); }
  std::vector<Run> Positions(int member, int group) const {
    return PositionsOf(selection(member), members_[member].state->spans(), group);
  }
  std::span<const int32_t> Units(int member, int group) const {
    return UnitsOf(selection(member), group);
  }
  // The cost of the last layer attended.
  const StepCost& cost(int member) const { return cost_[member]; }

 private:
  // New tokens of one member that attend the same selection of what lies before them.
  struct Chunk {
    int member = 0;
    int32_t begin = 0, count = 0;  // of the member's new tokens
    Selection selection;
  };
  // A part of the positions that a group of heads attends on pages, at most kAttendSliceRows.
  struct Slice {
    size_t first_run = 0, run_count = 0;  // in runs_
    int32_t begin = 0, end = 0;           // first position, and one past the last
    int32_t rank = 0;                     // of its first row in the list
  };
  // What a group of heads attends in one extent, or of one level of the index (stored_parts.cc).
  struct StoredPart {
    enum class Kind : uint8_t { kPacked, kRawRows, kFactors, kSpanMeans, kIndexMeans };
    Kind kind = Kind::kPacked;
    int32_t source = 0;                   // packed: segment; spans: part; index: level
    size_t first_run = 0, run_count = 0;  // kPacked: local rows, in runs_
  };
  // The queries of some new tokens of one chunk for the heads that share a list of rows: those of
  // one KV head, or one query head. Merged from the partials of its slices, then its stored parts.
  struct Tile {
    int chunk = 0, kv_head = 0;
    int32_t first_head = 0, group = 0;   // query heads
    int32_t begin = 0, queries = 0;      // of the member's new tokens
    int32_t history = 0;                 // rows of the list before the chunk's first new token
    size_t first_slice = 0, slices = 0;  // in slices_: those that some query sees
    size_t first_part = 0, parts = 0;    // in parts_
  };

  const StepMember& MemberOf(const Tile& tile) const {
    return members_[chunks_[tile.chunk].member];
  }
  void AddChunks(int member);
  void SelectChunkOf(int layer, const Rows& q, Chunk* chunk);
  int32_t VisibleEnd(const Tile& tile) const;
  int64_t PartialRows(const Tile& tile) const;
  Rows DenseQueries(const Rows& q, int32_t first, int32_t count);
  void StoreOutput(const MutableRows& out);
  void MeasureShadows(int layer, const Rows& q, const MutableRows& out);
  const float* QueriesOf(const Rows& q, const Tile& tile) const;
  int32_t CutRuns(const std::vector<Run>& selected, int32_t from, int32_t history, int32_t end);
  void PlaceRows(const Tile& tile, const Slice& slice, AttendWork* work) const;
  int32_t StoredEnd(const Chunk& chunk) const;
  void PlanChunk(int chunk);
  void CountCosts(int layer);
  void AddWorks(int layer, const Rows& q, const Tile& tile, int64_t partial_row);
  void AddMerge(const Tile& tile, int64_t partial_row, const MutableRows& out, float* lse);
  void RunWorks();
  void RunTiles(int layer, const Rows& q, const MutableRows& out, float* lse,
                std::span<const Tile> tiles);

  // stored_parts.cc
  void PlanStored(Tile* tile);
  void PlanPacked(const PackedStorage& packed, Tile* tile);
  void PlanSpans(const SpanStorage& spans, Tile* tile);
  void AddStored(int layer, const Rows& q, const Tile& tile, const StoredPart& part, int64_t row);
  void AddPacked(int layer, const Rows& q, const Tile& tile, const StoredPart& part, int64_t row);
  void AddRawRows(int layer, const Rows& q, const Tile& tile, const StoredPart& part, int64_t row);
  void AddFactors(int layer, const Rows& q, const Tile& tile, const StoredPart& part, int64_t row);
  void AddMeans(int layer, const Rows& q, const Tile& tile, const StoredPart& part, int64_t row);
  void ClearWorks();
  void ResolveWorks();

  std::vector<Chunk> chunks_;
  std::vector<int> last_chunk_;                            // of each member
  std::vector<StepCost> cost_;                             // of each member
  std::vector<std::unique_ptr<ShadowAttention>> shadows_;  // of each member; empty: of none
  int selected_layer_ = -1;
  const Backend& backend_;
  Executor& executor_;

  // Scratch, kept from layer to layer. Works point into runs_, spans_ and rotated_ by offset until
  // all of them are made (ResolveWorks): those vectors may move.
  std::vector<float> q_, out_;  // fp32 copies, packed
  std::vector<Run> runs_;       // of all slices and parts; behind them those made for a round
  std::vector<Slice> slices_;
  std::vector<StoredPart> parts_;
  std::vector<Tile> tiles_;
  std::vector<AttendWork> attend_;
  std::vector<AttendPackedWork> packed_;
  std::vector<RotateWork> rotate_;
  std::vector<AttendLowRankWork> lowrank_;
  std::vector<AttendCoarseWork> coarse_;
  std::vector<size_t> attend_run_, packed_run_, coarse_run_;  // first run of each item, in runs_
  std::vector<size_t> packed_q_, lowrank_span_;               // the same in rotated_, in spans_
  std::vector<size_t> rotate_out_;
  std::vector<float> rotated_;
  std::vector<LowRankSpan> spans_;
  std::vector<MergeWork> merge_;
  std::vector<float> partial_m_, partial_l_, partial_o_;  // [rows], [rows], [rows][head_dim]
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_STEP_H_
