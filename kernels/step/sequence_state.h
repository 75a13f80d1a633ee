// SequenceState: what a sequence keeps between steps, in the process that runs its steps: plan,
// selector, reported series. Owned by a client's or a remote session's sequence.
//
// Threads: one call at a time for a state and for the step that it is in.
#ifndef KVSTRATA_KERNELS_STEP_SEQUENCE_STATE_H_
#define KVSTRATA_KERNELS_STEP_SEQUENCE_STATE_H_

#include <algorithm>
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

class CascadeTrigger;  // kernels/select/cascade_trigger.h
class CudaHotPages;    // cuda_hot_pages.h
struct CudaSentences;  // cuda_sentences.h
struct CudaVoteCache;  // cuda_vote_cache.h

// What an engine reported, by position.
struct ReportedSeries {
  std::span<const float> entropy;     // nats; NaN: none
  std::span<const uint8_t> boundary;  // 1: this token ends a sentence
};

// What steps on a GPU keep of a sequence, each made by the first step that wants it.
struct CudaSequence {
  std::shared_ptr<CudaVoteCache> vote_cache;  // a fork shares it
  std::shared_ptr<CudaSentences> sentences;   // of this sequence alone, as the next
  std::shared_ptr<CudaHotPages> hot_pages;
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
  // As PrefillDone, for a sequence whose steps are CudaSteps: what their plans compute at the end
  // of a prompt (chess its first selection) and its last index rows are made when the next step
  // begins.
  Status ClosePrompt();

  // Entropy, surprisal in nats and sentence boundaries of positions [first, first + n); any of the
  // arrays may be null. Each series comes in order, in parts. Entropy may skip positions, which
  // then have none (prompt and forced tokens are not sampled); surprisal and boundaries may skip
  // only the prefix that was held from the start, surprisal one position more: what follows a held
  // prefix was predicted by a token that this engine did not compute. It counts as 0 nats then. All
  // or nothing. INVALID_ARGUMENT: REPORT_RANGE (positions that do not exist), REPORT_ORDER
  // (reported before, or a gap), REPORT_VALUE (negative or not finite; boundary other than 0 and
  // 1).
  Status Report(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                const uint8_t* boundary);

  // The position that a report of surprisals, of none even, from `first` on skips behind the held
  // prefix, as Report has it; -1: none. Before that Report; who has the series too is told 0 nats
  // of it.
  int32_t SkippedPosition(int32_t first, const float* surprisal) const;

  // Whoever builds the plan's extents has the surprisal of the first `tokens` positions: it was
  // stored with the pages that the sequence was held for.
  void NoteHeldSurprisal(int32_t tokens) { surprisal_held_ = tokens; }

  // Somebody else wrote index rows, which the view has from now on: they are valid up to `tokens`.
  // Not in a step. REQUIRES: tokens <= tokens().
  void NoteIndexed(int32_t tokens) { indexed_tokens_ = std::max(indexed_tokens_, tokens); }

  // The tokens [first, first + ids.size()) were committed: those of `ends` (ascending) end a
  // sentence (a model's boundary tokens). An engine's own report of a position replaces this.
  void NoteTokens(int32_t first, std::span<const int32_t> ids, std::span<const int32_t> ends);

  // The ids of those among the first `tokens` tokens that lie behind the last whole page; none
  // beyond tokens().
  std::span<const int32_t> TailIds(uint32_t tokens) const;

  // The tokens from `tokens` on are taken back, with all that was reported and chosen of them.
  // What a selector had chosen by them it chooses anew. Not in a step.
  // REQUIRES: 0 <= tokens <= tokens(), and no less than a prompt that is complete.
  void Truncate(int32_t tokens);

  // Sentence ends that were stored with the held pages, from the first position on. They replace
  // what NoteTokens said of those, and a report may replace them.
  void HoldBoundaries(std::span<const uint8_t> ends);

  // The selector's arrays, as of the last CatchUp; for every plan also the reported series:
  // "entropy" f32 (NaN: none), "surprisal" f32 (same), "boundary" u8.
  Result<InspectArray> Inspect(const SequenceView& view, const Backend& backend, Executor& executor,
                               std::string_view name) const;

  // "ok", or which input the plan misses and what it does instead: kernels/select/notice.h has the
  // texts, several are joined by "; " (status_text.cc). `view` as of the last Refresh.
  std::string StatusText(const SequenceView& view) const;

  // What the last Refresh found; null: nothing of that codec. A prompt is computed from its raw
  // pages, which stay until it is complete, also where a segment of it is packed already; from
  // what a codec holds of it only where it was opened without them.
  const PackedStorage* packed() const { return from_raw() ? nullptr : packed_.get(); }
  const SpanStorage* spans() const { return from_raw() ? nullptr : spans_.get(); }

  const Geometry& geometry() const { return geometry_; }
  const Plan& plan() const { return plan_; }
  const IndexLayout& index() const { return index_; }
  // Null where keys are stored as attention uses them.
  const RotaryTable* rotary() const { return rotary_.get(); }
  int32_t tokens() const { return tokens_; }
  int32_t indexed_tokens() const { return indexed_tokens_; }
  int32_t prompt_tokens() const { return prompt_tokens_; }
  ReportedSeries reported() const { return {entropy_, boundary_}; }
  // As Selector::trigger.
  CascadeTrigger* trigger() const { return selector_->trigger(); }

  CudaSequence on_gpu;

 private:
  friend class Step;
  friend class CudaStep;
  SequenceState() = default;
  bool from_raw() const { return prompt_tokens_ < 0 && !raw_gone_; }
  Status CheckPrompt() const;
  // status_text.cc; "" nothing.
  std::string LengthStatus() const;
  std::string PromptStatus() const;
  std::string SelectorStatus(const SequenceView& view) const;
  std::string CodecStatus() const;
  SelectContext Context(const SequenceView& view, const Backend& backend, Executor& executor) const;
  // The context without backend and executor.
  SelectContext Context(const SequenceView& view) const;

  Geometry geometry_;
  Plan plan_;
  IndexLayout index_;
  std::shared_ptr<const RotaryTable> rotary_;  // shared with clones
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<PackedStorage> packed_;
  std::unique_ptr<SpanStorage> spans_;
  bool raw_gone_ = false;                   // pages that they cover are absent
  uint64_t version_ = 0;                    // of the table that they were parsed from
  std::vector<float> entropy_, surprisal_;  // by position; NaN: none
  std::vector<uint8_t> boundary_;
  std::vector<int32_t> ids_;      // of all tokens
  bool boundary_marked_ = false;  // not by a report: reports may replace any of it
  int32_t held_tokens_ = 0;       // at the start
  int32_t surprisal_held_ = 0;    // of them, NoteHeldSurprisal
  int32_t tokens_ = 0;
  int32_t indexed_tokens_ = 0;
  int32_t prompt_tokens_ = -1;
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_SEQUENCE_STATE_H_
