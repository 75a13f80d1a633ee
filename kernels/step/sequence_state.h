// SPDX-License-Identifier: Apache-2.0
// SequenceState: what a sequence keeps between steps, in the process that runs its steps: plan,
// selector, reported series. Owned by a client's or a remote session's sequence.
//
// Threads: one call at a time for a state and for the step that it is in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "kernels/backend/backend.h"
#include "kernels/codec/codec.h"
#include "kernels/plan/plan.h"
#include "kernels/segment/segmenter.h"
#include "kernels/select/cuda_history.h"
#include "kernels/select/selector.h"
#include "kernels/step/reported_series.h"

namespace kvstrata {

class CudaHotPages;  // cuda_hot_pages.h
class CudaHotRows;   // cuda_hot_rows.h

// What steps on a GPU keep of a sequence, each made by the first step that wants it.
struct CudaSequence {
  std::shared_ptr<CudaHistory> history;     // its selector's
  std::shared_ptr<CudaHotPages> hot_pages;  // for this sequence alone
  std::shared_ptr<CudaHotRows> hot_rows;    // the same
};

class SequenceState {
 public:
  // `tokens` are already held (a prefix hit) and their index is valid up to `indexed_tokens`.
  // codec: null: the plan's; else it outlives the state.
  SequenceState(const Geometry& geometry, const Plan& plan, int32_t tokens, int32_t indexed_tokens,
                const Codec* codec = nullptr);

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

  // Adds to what is reported of positions [first, first + n), in nats (ReportedSeries::Add).
  // INVALID_ARGUMENT REPORT_RANGE: positions that do not exist; REPORT_ORDER, REPORT_VALUE.
  Status Report(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                const uint8_t* boundary);

  // Somebody else wrote index rows, which the view has from now on: they are valid up to `tokens`.
  // Not in a step. REQUIRES: tokens <= tokens().
  void NoteIndexed(int32_t tokens) { indexed_tokens_ = std::max(indexed_tokens_, tokens); }

  // A step's `count` new tokens are committed: all layers hold them.
  void Advance(int32_t count);

  // The tokens from `tokens` on are taken back, with all that was reported and chosen of them.
  // What a selector had chosen by them it chooses anew. Not in a step.
  // REQUIRES: 0 <= tokens <= tokens(), and no less than a prompt that is complete.
  void Truncate(int32_t tokens);

  // Arrays of the selector and of the codec, as of the last CatchUp; for every plan also the
  // series: "entropy" f32 (NaN: none), "surprisal" f32 (same), "boundary" u8.
  Result<InspectArray> Inspect(const SequenceView& view, const Backend& backend, Executor& executor,
                               std::string_view name) const;

  // "ok", or which input the plan misses and what it does instead: kernels/select/notice.h has the
  // texts, several are joined by "; " (status_text.cc). `view` as of the last Refresh.
  std::string StatusText(const SequenceView& view) const;

  // What the last Refresh found; null: all rows are on pages. A prompt is computed from its raw
  // pages, which stay until it is complete, also where a codec holds some of it already; from what
  // a codec holds of it only where it was opened without them.
  const StoredRows* stored() const { return from_raw() ? nullptr : parsed_.stored.get(); }

  const Geometry& geometry() const { return geometry_; }
  const Plan& plan() const { return plan_; }
  const IndexLayout& index() const { return index_; }
  // Null where keys are stored as attention uses them.
  const RotaryTable* rotary() const { return rotary_.get(); }
  int32_t tokens() const { return tokens_; }
  int32_t indexed_tokens() const { return indexed_tokens_; }
  int32_t prompt_tokens() const { return prompt_tokens_; }
  // The ids of those among the first `tokens` tokens that lie behind the last whole page; none
  // beyond tokens().
  std::span<const int32_t> TailIds(uint32_t tokens) const {
    return reported_.TailIds(tokens, tokens % static_cast<uint32_t>(geometry_.page_tokens));
  }
  ReportedSeries& reported() { return reported_; }
  const ReportedSeries& reported() const { return reported_; }
  // For steps, which select and commit.
  Selector& selector() const { return *selector_; }
  // What the selector may use; without ops, where none are given.
  SelectContext Context(const SequenceView& view, const Backend* backend = nullptr,
                        Executor* executor = nullptr) const;

  CudaSequence on_gpu;

 private:
  struct Extents {
    std::unique_ptr<StoredRows> stored;
    bool raw_gone = false;  // pages that they cover are absent
    uint64_t version = 0;   // the table's that they were parsed from
  };

  SequenceState() = default;
  bool from_raw() const { return prompt_tokens_ < 0 && !parsed_.raw_gone; }

  Geometry geometry_;
  Plan plan_;
  const Codec* codec_ = nullptr;
  IndexLayout index_;
  std::shared_ptr<const RotaryTable> rotary_;  // shared with clones
  std::unique_ptr<Selector> selector_;
  Extents parsed_;  // not of clones
  ReportedSeries reported_;
  int32_t tokens_ = 0;
  int32_t indexed_tokens_ = 0;
  int32_t prompt_tokens_ = -1;
};

}  // namespace kvstrata
