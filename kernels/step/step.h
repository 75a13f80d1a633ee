// A step: one forward pass over a batch of sequences (API.md, "A step"). Both roads run this code,
// the client library on mapped pages and the daemon for remote callers, so both give the same bits.
//
//   SequenceState  what a sequence keeps between steps, in the process that runs its steps: plan,
//                  selector, reported series. Owned by a client's or a remote session's sequence.
//   Step           begin (constructor) -> per layer Append, [Select,] Attend -> End.
//
// Batches are packed and ragged: q, k, v hold the new tokens of member 0, then of member 1, ...
// Members may have different plans but share one geometry.
// Threads: one call at a time for a Step and for the states in it; different Steps are independent.
#ifndef KVSTRATA_KERNELS_STEP_STEP_H_
#define KVSTRATA_KERNELS_STEP_STEP_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/codec/lowrank.h"
#include "kernels/codec/packed.h"
#include "kernels/plan.h"
#include "kernels/segment/segmenter.h"
#include "kernels/select/selector.h"

namespace kvstrata {

// Rows of a packed batch: [tokens][heads][head_dim], head_dim contiguous.
struct Rows {
  const std::byte* data = nullptr;
  int64_t token_stride = 0;  // bytes
  int64_t head_stride = 0;   // bytes
  DType dtype = DType::kF32;
};
struct MutableRows {
  std::byte* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  DType dtype = DType::kF32;
};

class SequenceState {
 public:
  // `tokens` are already held (a prefix hit) and their index is valid up to `indexed_tokens`.
  SequenceState(const Geometry& geometry, const Plan& plan, int32_t tokens, int32_t indexed_tokens);

  std::unique_ptr<SequenceState> Clone() const;

  // Parses the extents of the view's table, if that is another one than the last time. Before every
  // call below that takes a view, inside the same epoch. DATA_LOSS EXTENT_INVALID.
  Status Refresh(const SequenceView& view);

  // Summarises complete units below view.tokens and lets the selector act on what was committed and
  // reported since; Begin of a step and settle do this. REQUIRES: view.tokens == tokens().
  void CatchUp(const SequenceView& view, const Backend& backend, Executor& executor);

  // The prompt is complete at tokens(); runs the plan's end-of-prefill work.
  // FAILED_PRECONDITION PREFILL_REPEATED when it was already, SEQUENCE_EMPTY without tokens.
  Status PrefillDone(const SequenceView& view, const Backend& backend, Executor& executor);

  // Entropy, surprisal in nats and sentence boundaries of positions [first, first + n); any of the
  // arrays may be null. Each series comes in order, in parts. Entropy may skip positions, which
  // then have none (prompt and forced tokens are not sampled); surprisal and boundaries may skip
  // only the prefix that was held from the start. All or nothing. INVALID_ARGUMENT: REPORT_RANGE
  // (positions that do not exist), REPORT_ORDER (reported before, or a gap), REPORT_VALUE (negative
  // or not finite; boundary other than 0 and 1).
  Status Report(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                const uint8_t* boundary);

  // The tokens [first, first + ids.size()) were committed: those of `ends` (ascending) end a
  // sentence (a model's boundary tokens). An engine's own report of a position replaces this.
  void MarkBoundaries(int32_t first, std::span<const int32_t> ids, std::span<const int32_t> ends);

  // The selector's arrays, as of the last CatchUp; for every plan also the reported series:
  // "entropy" f32 (NaN: none), "surprisal" f32 (same), "boundary" u8.
  Result<InspectArray> Inspect(const SequenceView& view, const Backend& backend, Executor& executor,
                               std::string_view name) const;

  // "ok", or which input the plan misses and what it does instead (DECISIONS 3).
  std::string StatusText() const;

  // What the last Refresh found; null: nothing of that codec. A prompt is computed from its raw
  // pages, which stay until it is complete, also where a segment of it is packed already.
  const PackedStorage* packed() const { return prompt_tokens_ < 0 ? nullptr : packed_.get(); }
  const SpanStorage* spans() const { return prompt_tokens_ < 0 ? nullptr : spans_.get(); }

  const Geometry& geometry() const { return geometry_; }
  const Plan& plan() const { return plan_; }
  const IndexLayout& index() const { return index_; }
  // Null where keys are stored as attention uses them.
  const RotaryTable* rotary() const { return rotary_.get(); }
  int32_t tokens() const { return tokens_; }
  int32_t indexed_tokens() const { return indexed_tokens_; }
  int32_t prompt_tokens() const { return prompt_tokens_; }

 private:
  friend class Step;
  SequenceState() = default;
  SelectContext Context(const SequenceView& view, const Backend& backend, Executor& executor) const;

  Geometry geometry_;
  Plan plan_;
  IndexLayout index_;
  std::shared_ptr<const RotaryTable> rotary_;  // shared with clones
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<PackedStorage> packed_;
  std::unique_ptr<SpanStorage> spans_;
  uint64_t version_ = 0;                    // of the table that they were parsed from
  std::vector<float> entropy_, surprisal_;  // by position; NaN: none
  std::vector<uint8_t> boundary_;
  bool boundary_marked_ = false;  // by MarkBoundaries: reports may replace any of it
  int32_t held_tokens_ = 0;       // at the start
  int32_t tokens_ = 0;
  int32_t indexed_tokens_ = 0;
  int32_t prompt_tokens_ = -1;
};

struct StepMember {
  SequenceState* state = nullptr;
  SequenceView view;       // view.tokens == state->tokens(); pages cover tokens + new_tokens
  int32_t new_tokens = 0;  // >= 1
};

// What attending one layer read for one member, over all heads; rows are (position, KV head) pairs,
// or (position, query head) where heads have lists of their own.
struct StepCost {
  uint64_t rows = 0;          // at full resolution, in whatever form
  uint64_t coarse_rows = 0;   // units as one row
  uint64_t attend_bytes = 0;  // of both
  uint64_t select_bytes = 0;  // summaries and keys that the selection read
};

class ShadowAttention;  // shadow_attention.h

class Step {
 public:
  // Catches every member up: its index, for all layers, and its selector.
  // REQUIRES: members not empty, one geometry; states and views outlive the Step.
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
  // prompt is cut at multiples of plan.chunk, each chunk with a selection of its own, where the
  // selector selects in prefill (DECISIONS 4).
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
  // One new token behind a complete prompt.
  bool Decodes(int member) const;

  // All layers hold the new tokens: the states advance. The Step is over. A Step that is destroyed
  // without End leaves its states as they were.
  void End();

  // The selection of the last layer selected or attended; of a member's last chunk.
  const Selection& selection(int member) const { return chunks_[last_chunk_[member]].selection; }
  // The same as lists: 1, kv_heads or query_heads groups of heads.
  int Groups(int member) const;
  // Ascending runs of the positions that a group attends one by one, whatever form holds them.
  std::vector<Run> Positions(int member, int group) const;
  std::span<const int32_t> Units(int member, int group) const;
  // Of the last layer attended.
  const StepCost& cost(int member) const { return cost_[member]; }
  int members() const { return static_cast<int>(members_.size()); }
  const StepMember& member(int i) const { return members_[i]; }
  int32_t tokens() const { return tokens_; }  // sum of new tokens

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

  const Geometry& geometry() const { return members_[0].state->geometry(); }
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
  void PlanChunk(int chunk);
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
  StepCost* CostOf(const Tile& tile) { return &cost_[chunks_[tile.chunk].member]; }
  void ClearWorks();
  void ResolveWorks();

  std::vector<StepMember> members_;
  std::vector<int32_t> first_row_;  // of each member in the packed batch
  std::vector<Chunk> chunks_;
  std::vector<int> last_chunk_;                            // of each member
  std::vector<StepCost> cost_;                             // of each member
  std::vector<std::unique_ptr<ShadowAttention>> shadows_;  // of each member; empty: of none
  int selected_layer_ = -1;
  int32_t tokens_ = 0;
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
