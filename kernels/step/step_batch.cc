#include "kernels/step/step_batch.h"

#include <algorithm>

namespace kvstrata {

int GroupsOf(const Selection& selection) {
  return static_cast<int>(std::max(selection.runs.size(), selection.units.size()));
}

std::span<const int32_t> UnitsOf(const Selection& selection, int group) {
  const auto& units = selection.units;
  if (units.empty()) return {};  // full and window have none
  return units[units.size() * static_cast<size_t>(group) /
               static_cast<size_t>(GroupsOf(selection))];
}

std::vector<Run> PositionsOf(const Selection& selection, const SpanStorage* spans, int group) {
  const size_t list =
      selection.runs.size() * static_cast<size_t>(group) / static_cast<size_t>(GroupsOf(selection));
  if (spans == nullptr || selection.full) return selection.runs[list];
  std::vector<Run> runs = selection.runs[list];
  for (const int32_t unit : UnitsOf(selection, group)) runs.push_back(spans->spans()[unit]);
  return Normalize(std::move(runs));
}

StepBatch::StepBatch(std::vector<StepMember> members) : members_(std::move(members)) {
  KVS_CHECK(!members_.empty());
  for (const StepMember& m : members_) {
    KVS_CHECK(m.new_tokens >= 1 && m.state->geometry() == geometry());
    first_row_.push_back(tokens_);
    tokens_ += m.new_tokens;
  }
}

bool StepBatch::Decodes(int member) const {
  return members_[member].new_tokens == 1 && members_[member].state->prompt_tokens() >= 0;
}

}  // namespace kvstrata
