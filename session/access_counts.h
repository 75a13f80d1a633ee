// SPDX-License-Identifier: Apache-2.0
// AccessCounts: which of a sequence's pages its steps attend, counted in the session segment where
// the store reads it (docs/shm_layout.md). One count for each storage page of which any head
// attended any row, in a layer and step.
//
// Threads: one at a time; others may count other sequences. Cost: the selection's runs, and one
// store for each page attended.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/step/step_batch.h"
#include "proto/shm_layout.h"
#include "session/session_sequence.h"

namespace kvstrata {

class AccessCounts {
 public:
  explicit AccessCounts(shm::SessionHeader* session) : session_(*session) {}

  // REQUIRES: the table of `s` is loaded, its epoch entered.
  void Count(const SessionSequence& s, const Selection& selection);

 private:
  void Mark(const Selection& selection, int32_t page_tokens, uint64_t pages);

  shm::SessionHeader& session_;
  std::vector<uint64_t> marks_;  // scratch, one bit a page
};

// What a session's steps did, counted in its segment (proto/shm_layout.h, StepCounts), where the
// daemon reads it for telemetry, on either transport.
//
// Threads: any, at the same time. Cost: a relaxed addition or two.

// The decode steps of a batch that ends: every member's, on a CPU and on a GPU.
void CountDecodes(const StepBatch& batch, shm::StepCounts* to);

// One layer's selection of a member that was just attended, on a CPU: a GPU decides by itself
// whether it keeps the last one, and nobody waits to hear of it.
void CountSelection(const StepMember& member, const Selection& selection, shm::StepCounts* to);

}  // namespace kvstrata
