// SPDX-License-Identifier: Apache-2.0
// Sentences: a sentence ends with a boundary token or with its max_length-th token
// (docs/spec/sentencekv.md 1). Token by token, so that it serves prompt and decode alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pages/page_view.h"

namespace kvstrata {

class SentenceRule {
 public:
  // REQUIRES: max_length >= 1.
  explicit SentenceRule(int32_t max_length, int32_t begin = 0)
      : max_length_(max_length), open_{begin, begin} {}

  // The next token; whether it ended its sentence, which is then *ended.
  bool Add(bool boundary, Run* ended) {
    ++open_.end;
    if (!boundary && open_.end - open_.begin < max_length_) return false;
    return Cut(ended);
  }

  // Ends the sentence that is open (the prompt is complete); false when it has no token.
  bool Cut(Run* ended) {
    if (open_.begin == open_.end) return false;
    *ended = open_;
    open_.begin = open_.end;
    return true;
  }

  // The sentence that is open: its tokens so far.
  Run open() const { return open_; }

 private:
  int32_t max_length_;
  Run open_;
};

// Sentences of `range`, what is left at its end included. `boundary` by position; positions beyond
// it are no boundaries.
std::vector<Run> SentencesIn(std::span<const uint8_t> boundary, Run range, int32_t max_length);

}  // namespace kvstrata
