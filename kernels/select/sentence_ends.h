// SPDX-License-Identifier: Apache-2.0
// SentenceEnds: which sentences of generated text are complete (docs/spec/sentencekv.md 1), by
// counts and reported boundaries alone, so that steps on a GPU close them as the CPU's selector
// does. Private to selectors and steps.
//
// A value; one a sequence. Threads: one call at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pages/page_view.h"

namespace kvstrata {

class SentenceEnds {
 public:
  explicit SentenceEnds(int32_t max_length) : max_length_(max_length) {}

  // The prompt is complete: a sentence begins behind it.
  void Start(int32_t prompt_tokens) { prompt_ = prompt_tokens; }

  // Where the sentence begins that is being generated.
  int32_t begin() const { return ends_.empty() ? prompt_ : ends_.back(); }

  // The sentences that are complete at `tokens`. A boundary that is reported late ends its sentence
  // late.
  std::vector<Run> Close(std::span<const uint8_t> boundary, int32_t tokens);

  // Tokens from `tokens` on are taken back: a sentence that ended behind them goes on.
  void Truncate(int32_t tokens);

 private:
  int32_t max_length_;
  int32_t prompt_ = 0;
  std::vector<int32_t> ends_;  // ends of the complete ones, ascending
};

}  // namespace kvstrata
