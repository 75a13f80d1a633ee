#include "kernels/select/sentence_ends.h"

#include "kernels/segment/sentence_rule.h"

namespace kvstrata {

std::vector<Run> SentenceEnds::Close(std::span<const uint8_t> boundary, int32_t tokens) {
  SentenceRule rule(max_length_, begin_);
  std::vector<Run> complete;
  Run ended;
  for (int32_t t = begin_; t < tokens; ++t) {
    const auto i = static_cast<size_t>(t);
    if (rule.Add(i < boundary.size() && boundary[i] != 0, &ended)) complete.push_back(ended);
  }
  if (!complete.empty()) begin_ = complete.back().end;
  return complete;
}

}  // namespace kvstrata
