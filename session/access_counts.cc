// SPDX-License-Identifier: Apache-2.0
#include "session/access_counts.h"

#include <algorithm>
#include <atomic>
#include <bit>

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

void AccessCounts::Mark(const Selection& selection, int32_t page_tokens, uint64_t pages) {
  marks_.assign((pages + 63) / 64, 0);
  // Pages hold a power of two of tokens: runs are many, and divisions slow.
  const int shift = std::countr_zero(static_cast<uint32_t>(page_tokens));
  for (const std::vector<Run>& runs : selection.runs) {
    for (const Run& run : runs) {
      if (run.end <= run.begin) continue;
      const auto first = static_cast<uint64_t>(run.begin) >> shift;
      const auto last = static_cast<uint64_t>(run.end - 1) >> shift;
      for (uint64_t p = first; p <= last && p < pages; ++p) {
        marks_[p / 64] |= uint64_t{1} << (p % 64);
      }
    }
  }
}

void AccessCounts::Count(const SessionSequence& s, const Selection& selection) {
  // Plan full would count every page in every layer and say nothing.
  if (s.state->plan().selector == SelectorKind::kFull) return;
  const uint64_t first = s.table.table->first_access_counter;
  const uint64_t count = std::min<uint64_t>(s.table.table->access_counter_count, s.table.pages);
  if (count == 0 || first > shm::kAccessCounters || count > shm::kAccessCounters - first) return;
  Mark(selection, s.state->geometry().page_tokens, count);
  auto* const access_counters =
      reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(&session_) +
                                  session_.access_counters_offset) +
      first;
  for (size_t w = 0; w < marks_.size(); ++w) {
    for (uint64_t bits = marks_[w]; bits != 0; bits &= bits - 1) {
      std::atomic_ref<uint32_t> at(
          access_counters[w * 64 + static_cast<size_t>(std::countr_zero(bits))]);
      // Not fetch_add: a sequence has one step at a time, and a lost count would not matter.
      at.store(at.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  }
}

}  // namespace kvstrata
