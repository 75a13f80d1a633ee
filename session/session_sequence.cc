// SPDX-License-Identifier: Apache-2.0
#include "session/session_sequence.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvstrata {

std::shared_ptr<const std::vector<int32_t>> Ascending(std::vector<int32_t> boundary_tokens) {
  std::ranges::sort(boundary_tokens);
  return std::make_shared<const std::vector<int32_t>>(std::move(boundary_tokens));
}

void BeginState(const Geometry& geometry, const Plan& plan, std::span<const int32_t> tokens,
                const HeldAtOpen& held, SessionSequence* s) {
  s->state = std::make_unique<SequenceState>(geometry, plan, static_cast<int32_t>(held.tokens),
                                             static_cast<int32_t>(held.indexed_tokens));
  s->told_indexed = held.indexed_tokens;
  s->state->reported().NoteHeldSurprisal(static_cast<int32_t>(held.surprisal_tokens));
  s->state->reported().NoteTokens(0, tokens.first(std::min<size_t>(held.tokens, tokens.size())),
                                  *s->boundary_tokens);
  s->state->reported().HoldBoundaries(held.boundary);
}

// A fork holds what its parent committed, and inherits the index as far as the store was told.
Status BeginFork(const SessionSequence& parent, const HeldAtOpen& held, SessionSequence* s) {
  s->model = parent.model;
  s->boundary_tokens = parent.boundary_tokens;
  s->state = parent.state->Clone();
  s->told_indexed = held.indexed_tokens;
  const auto tokens = static_cast<uint32_t>(s->state->tokens());
  const auto indexed = static_cast<uint32_t>(s->state->indexed_tokens());
  if (tokens == held.tokens && indexed <= held.indexed_tokens) return OkStatus();
  return Internal("FORK_DIVERGED", "the store holds " + std::to_string(held.tokens) + " tokens (" +
                                       std::to_string(held.indexed_tokens) +
                                       " indexed), the session " + std::to_string(tokens) + " (" +
                                       std::to_string(indexed) + ")");
}

shm::PageEntry PageEntryOf(const SessionSequence& s, uint32_t page) {
  shm::PageEntry entry = *s.table.page(page);
  const int64_t end = (int64_t{page} + 1) * s.state->geometry().page_tokens;
  const bool absent = (entry.flags & shm::kPageAbsent) != 0;
  if (end <= s.state->tokens() && !absent) entry.flags |= shm::kPageSealed;
  return entry;
}

void TakeBack(SessionSequence* s, uint32_t tokens) {
  s->state->Truncate(static_cast<int32_t>(tokens));
  s->told_indexed = std::min(s->told_indexed, tokens);
}

}  // namespace kvstrata
