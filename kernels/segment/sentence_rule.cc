// SPDX-License-Identifier: Apache-2.0
#include "kernels/segment/sentence_rule.h"

namespace kvstrata {

std::vector<Run> SentencesIn(std::span<const uint8_t> boundary, Run range, int32_t max_length) {
  SentenceRule rule(max_length, range.begin);
  std::vector<Run> sentences;
  Run ended;
  for (int32_t t = range.begin; t < range.end; ++t) {
    const auto i = static_cast<size_t>(t);
    if (rule.Add(i < boundary.size() && boundary[i] != 0, &ended)) sentences.push_back(ended);
  }
  if (rule.Cut(&ended)) sentences.push_back(ended);
  return sentences;
}

}  // namespace kvstrata
