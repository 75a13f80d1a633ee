// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/step_batch.h"

#include <algorithm>

namespace kvstrata {

std::vector<Run> PositionsOf(const Selection& selection, const StoredRows* stored, int group) {
  const size_t list =
      selection.runs.size() * static_cast<size_t>(group) / static_cast<size_t>(GroupsOf(selection));
  if (stored == nullptr || selection.full) return selection.runs[list];
  std::vector<Run> runs = selection.runs[list];
  stored->AppendUnits(UnitsOf(selection, group), &runs);
  return runs.size() == selection.runs[list].size() ? runs : Normalize(std::move(runs));
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
