// SPDX-License-Identifier: Apache-2.0
// SessionSequence: what a session keeps of a sequence whose steps it runs, on either transport: a
// linked session (client/linked/linked_session.h) in the engine's process, a remote one
// (server/rpc/steps/remote_session.h) in the daemon. The store is the daemon's, which holds the
// pages and is told what the steps did, by a ring or by a call.
//
// Ownership: a session owns its sequences, a sequence its state. Threads: one at a time for a
// sequence. Cost: nothing here asks the store; BeginFork copies a state.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/codec/extent_descriptions.h"
#include "kernels/step/sequence_state.h"
#include "proto/table_reader.h"

namespace kvstrata {

struct SessionSequence {
  uint64_t id = 0;
  uint64_t model = 0;
  uint32_t slot = 0;
  std::unique_ptr<SequenceState> state;
  std::shared_ptr<const std::vector<int32_t>> boundary_tokens;  // the model's, ascending
  uint32_t told_indexed = 0;    // what the store knows of state->indexed_tokens()
  uint32_t recall_audit = 0;    // the last audit that sampled a step of this sequence
  uint32_t recall_dropped = 0;  // its samples that were lost

  // The table as it was loaded last, resolved. `table` is valid inside the epoch of that load only,
  // the addresses as long as `version` is the published one.
  shm::TableView table;
  uint64_t version = 0;
  std::vector<std::byte*> pages, blocks;  // null: a page that was released
  std::vector<uint8_t> host_pages;        // steps on a GPU: 1 where a page is the host's
  bool has_host_pages = false;
  std::vector<ExtentView> extents;
  ExtentDescriptions descriptions;  // for the extents in a GPU's memory

  SequenceView View() const {
    return {pages.data(),
            blocks.data(),
            state->tokens(),
            extents.data(),
            static_cast<int32_t>(extents.size()),
            version,
            has_host_pages ? host_pages.data() : nullptr};
  }
};

// What the store answers to an open or a fork.
struct HeldAtOpen {
  uint32_t tokens = 0;
  uint32_t indexed_tokens = 0;
  uint32_t surprisal_tokens = 0;      // leading ones whose surprisal was stored with held pages
  std::span<const uint8_t> boundary;  // sentence ends of leading ones, stored with held pages
};

// A model's boundary tokens as a sequence has them.
std::shared_ptr<const std::vector<int32_t>> Ascending(std::vector<int32_t> boundary_tokens);

// The state of a sequence that was opened with `tokens`. REQUIRES: s->boundary_tokens is set.
void BeginState(const Geometry& geometry, const Plan& plan, std::span<const int32_t> tokens,
                const HeldAtOpen& held, SessionSequence* s);

// The state of a fork: its parent's, with the parent's model. INTERNAL FORK_DIVERGED: the store
// holds other tokens, or fewer indexed ones; the fork is then to be closed.
Status BeginFork(const SessionSequence& parent, const HeldAtOpen& held, SessionSequence* s);

// The store took back the tokens from `tokens` on. REQUIRES: as SequenceState::Truncate.
void TakeBack(SessionSequence* s, uint32_t tokens);

// The entry of a page, of the table that was loaded last. A table does not change when its pages
// fill, so that a page which committed tokens fill is sealed whatever the table says; of one that
// was released nothing else is set.
shm::PageEntry PageEntryOf(const SessionSequence& s, uint32_t page);

// Tells the store how far the index is valid, so that a fork inherits it. tell(first, indexed) is a
// commit of no tokens behind `first`; it is not called for what the store knows.
template <typename Tell>
Status TellIndexed(SessionSequence* s, const Tell& tell) {
  const auto indexed = static_cast<uint32_t>(s->state->indexed_tokens());
  if (indexed == s->told_indexed) return OkStatus();
  KVS_RETURN_IF_ERROR(tell(static_cast<uint32_t>(s->state->tokens()), indexed));
  s->told_indexed = indexed;
  return OkStatus();
}

}  // namespace kvstrata
