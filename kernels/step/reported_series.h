// SPDX-License-Identifier: Apache-2.0
// ReportedSeries: what an engine and its tokens say of a sequence's positions: entropy, surprisal,
// sentence boundaries, and the ids. Part of a SequenceState, which knows how many tokens there are.
//
// Each series comes in order, in parts, by position; NaN: none.
// Threads: one call at a time. Copies are independent.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/pages/inspect_array.h"

namespace kvstrata {

class ReportedSeries {
 public:
  ReportedSeries() = default;
  // `held_tokens` were there at the start.
  explicit ReportedSeries(int32_t held_tokens) : held_tokens_(held_tokens) {}

  std::span<const float> entropy() const { return entropy_; }      // nats; NaN: none
  std::span<const float> surprisal() const { return surprisal_; }  // the same
  // Leading positions whose surprisal whoever builds the plan's extents has.
  int32_t surprisal_held() const { return surprisal_held_; }
  std::span<const uint8_t> boundary() const { return boundary_; }  // 1: this token ends a sentence

  // Positions [first, first + n) exist; any of the arrays may be null. Entropy may skip positions,
  // which then have none (prompt and forced tokens are not sampled); surprisal and boundaries may
  // skip only the prefix that was held from the start, surprisal one position more: what follows a
  // held prefix was predicted by a token that this engine did not compute. It counts as 0 nats
  // then. All or nothing. INVALID_ARGUMENT: REPORT_ORDER (reported before, or a gap), REPORT_VALUE
  // (negative or not finite; boundary other than 0 and 1).
  Status Add(int32_t first, int32_t n, const float* surprisal, const float* entropy,
             const uint8_t* boundary);

  // The position that a report of surprisals, of none even, from `first` on skips behind the held
  // prefix, as Add has it; -1: none. Before that Add; who has the series too is told 0 nats of it.
  int32_t SkippedPosition(int32_t first, const float* surprisal) const;

  // Whoever builds the plan's extents has the surprisal of the first `tokens` positions: it was
  // stored with the pages that the sequence was held for.
  void NoteHeldSurprisal(int32_t tokens) { surprisal_held_ = tokens; }

  // The tokens [first, first + ids.size()) were committed: those of `ends` (ascending) end a
  // sentence (a model's boundary tokens). An engine's own report of a position replaces this.
  void NoteTokens(int32_t first, std::span<const int32_t> ids, std::span<const int32_t> ends);

  // Sentence ends that were stored with the held pages, from the first position on. They replace
  // what NoteTokens said of those, and a report may replace them.
  void HoldBoundaries(std::span<const uint8_t> ends);

  // The ids of the last `tail` of the first `tokens` tokens; none where those are not all known.
  std::span<const int32_t> TailIds(uint32_t tokens, uint32_t tail) const;

  // Tokens from `tokens` on are taken back.
  void Truncate(int32_t tokens);

  // "entropy" f32, "surprisal" f32, "boundary" u8; nothing: another name.
  std::optional<InspectArray> Inspect(std::string_view name) const;

 private:
  std::vector<float> entropy_, surprisal_;  // by position; NaN: none
  std::vector<uint8_t> boundary_;
  std::vector<int32_t> ids_;      // ids of all tokens
  bool boundary_marked_ = false;  // not by a report: reports may replace any of it
  int32_t held_tokens_ = 0;       // at the start
  int32_t surprisal_held_ = 0;    // those of them with a surprisal
};

}  // namespace kvstrata
