// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/sentence_ends.h"

#include "kernels/segment/sentence_rule.h"

namespace kvstrata {

std::vector<Run> SentenceEnds::Close(std::span<const uint8_t> boundary, int32_t tokens) {
  SentenceRule rule(max_length_, begin());
  std::vector<Run> complete;
  Run ended;
  for (int32_t t = begin(); t < tokens; ++t) {
    const auto i = static_cast<size_t>(t);
    if (rule.Add(i < boundary.size() && boundary[i] != 0, &ended)) complete.push_back(ended);
  }
  for (const Run& sentence : complete) ends_.push_back(sentence.end);
  return complete;
}

void SentenceEnds::Truncate(int32_t tokens) {
  while (!ends_.empty() && ends_.back() > tokens) ends_.pop_back();
}

}  // namespace kvstrata
