// SPDX-License-Identifier: Apache-2.0
#include "session/step_counts.h"

namespace kvstrata {
namespace {

// Selectors that attend what an earlier step chose while that is good enough.
bool KeepsSelections(SelectorKind kind) {
  return kind == SelectorKind::kVote || kind == SelectorKind::kCascade;
}

}  // namespace

void CountDecodes(const StepBatch& batch, shm::StepCounts* to) {
  uint64_t decoded = 0, in_full = 0;
  for (int i = 0; i < batch.members(); ++i) {
    const StepMember& m = batch.member(i);
    if (!m.kept || !batch.Decodes(i)) continue;
    const Plan& plan = m.state->plan();
    ++decoded;
    // The step's own token counts, as selectors count.
    const bool selects = plan.selector != SelectorKind::kFull;
    in_full += selects && m.view.tokens + 1 < plan.min_tokens ? 1 : 0;
  }
  if (decoded != 0) to->decoded.fetch_add(decoded, std::memory_order_relaxed);
  if (in_full != 0) to->in_full.fetch_add(in_full, std::memory_order_relaxed);
}

void CountSelection(const StepMember& member, const Selection& selection, shm::StepCounts* to) {
  if (selection.full || !KeepsSelections(member.state->plan().selector)) return;
  to->selected.fetch_add(1, std::memory_order_relaxed);
  if (selection.scored_bytes == 0) to->reused.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kvstrata
