// SPDX-License-Identifier: Apache-2.0
// What a session's frames ask of the store, one function a message (proto/ring_messages.h), and
// what the store's late answers become.
//
// A handler checks sizes against what arrived, asks, and answers through RingState::replies; an
// event has no answer, and leaves its error with its sequence. Whoever serves the session calls
// them, one frame after the other. kDetach is RingSession's own: it ends the session.
#ifndef KVSTRATA_SERVER_ATTACH_RING_RING_HANDLERS_H_
#define KVSTRATA_SERVER_ATTACH_RING_RING_HANDLERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "proto/ring_messages.h"
#include "server/attach/ring/answer_box.h"
#include "server/attach/ring/awaited_requests.h"
#include "server/attach/ring/open_sequences.h"
#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/session_tensors.h"
#include "server/store/store.h"

namespace kvstrata::ring {

// What all messages of a session share.
struct RingState {
  Store* const store;
  const uint64_t session;
  const std::shared_ptr<AnswerBox> box;
  ReplyRing replies;
  AwaitedRequests awaited;
  OpenSequences sequences;
  SessionTensors tensors;
};

struct RingFrame {
  shm::FrameHeader header;
  std::span<const std::byte> payload;
};

// How the frame breaks the format, which costs the client its session; null: it was handled.
using Malformed = const char*;
inline constexpr Malformed kHandled = nullptr;

using Handler = Malformed (*)(RingState* state, const RingFrame& frame);
// For any frame but kDetach, by its type; null: there is no such type.
Handler HandlerOf(uint32_t type);
// Answers what has come into the box; whether there was something.
bool AnswerLate(RingState* state);

// ring_sequences.cc
Malformed OnRegisterModel(RingState* state, const RingFrame& frame);
Malformed OnOpen(RingState* state, const RingFrame& frame);
Malformed OnFork(RingState* state, const RingFrame& frame);
Malformed OnClose(RingState* state, const RingFrame& frame);
Malformed OnCloseKey(RingState* state, const RingFrame& frame);
Malformed OnTruncateKey(RingState* state, const RingFrame& frame);
Malformed OnGrow(RingState* state, const RingFrame& frame);
Malformed OnTruncate(RingState* state, const RingFrame& frame);
Malformed OnCommit(RingState* state, const RingFrame& frame);
Malformed OnReport(RingState* state, const RingFrame& frame);
Malformed OnPrefillDone(RingState* state, const RingFrame& frame);
Malformed OnRecall(RingState* state, const RingFrame& frame);
Malformed OnVerified(RingState* state, const RingFrame& frame);
// `tokens`: that its table covers.
void AnswerOpened(RingState* state, uint64_t id, const Result<OpenedSequence>& opened,
                  uint32_t tokens);

// ring_work.cc
Malformed OnSettle(RingState* state, const RingFrame& frame);
Malformed OnBuild(RingState* state, const RingFrame& frame);
Malformed OnRecompress(RingState* state, const RingFrame& frame);
Malformed OnCancelWork(RingState* state, const RingFrame& frame);
void AnswerBuilt(RingState* state, uint64_t id, const Result<BuildResult>& built);

// ring_lookup.cc
Malformed OnLookup(RingState* state, const RingFrame& frame);
Malformed OnCapacity(RingState* state, const RingFrame& frame);
Malformed OnPlanText(RingState* state, const RingFrame& frame);
void AnswerLookedUp(RingState* state, const LookupAnswer& answer);

// ring_import.cc
Malformed OnRegisterTensors(RingState* state, const RingFrame& frame);
Malformed OnSealBlocks(RingState* state, const RingFrame& frame);
Malformed OnAcknowledged(RingState* state, const RingFrame& frame);

}  // namespace kvstrata::ring

#endif  // KVSTRATA_SERVER_ATTACH_RING_RING_HANDLERS_H_
