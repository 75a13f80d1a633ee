// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/ring_handlers.h"

#include <chrono>
#include <utility>

#include "server/telemetry/traffic.h"

namespace kvstrata::ring {

Malformed Handle(RingState* state, const RingFrame& frame) {
  switch (frame.header.type) {
    case shm::kPing:
      if (!frame.payload.empty()) return "Ping with a payload";
      state->replies.Answer(frame.header.id, OkStatus());
      return kHandled;
    case shm::kRegisterModel:
      return OnRegisterModel(state, frame);
    case shm::kOpenSequence:
      return OnOpen(state, frame);
    case shm::kForkSequence:
      return OnFork(state, frame);
    case shm::kCloseSequence:
      return OnClose(state, frame);
    case shm::kGrow:
      return OnGrow(state, frame);
    case shm::kTruncate:
      return OnTruncate(state, frame);
    case shm::kCloseKey:
      return OnCloseKey(state, frame);
    case shm::kTruncateKey:
      return OnTruncateKey(state, frame);
    case shm::kSettle:
      return OnSettle(state, frame);
    case shm::kLookup:
      return OnLookup(state, frame);
    case shm::kCapacity:
      return OnCapacity(state, frame);
    case shm::kRegisterTensors:
      return OnRegisterTensors(state, frame);
    case shm::kSealBlocks:
      return OnSealBlocks(state, frame);
    case shm::kAcknowledged:
      return OnAcknowledged(state, frame);
    case shm::kPlanText:
      return OnPlanText(state, frame);
    case shm::kBuild:
      return OnBuild(state, frame);
    case shm::kRecompress:
      return OnRecompress(state, frame);
    case shm::kCancelWork:
      return OnCancelWork(state, frame);
    case shm::kCommit:
      return OnCommit(state, frame);
    case shm::kReport:
      return OnReport(state, frame);
    case shm::kPrefillDone:
      return OnPrefillDone(state, frame);
    case shm::kRecall:
      return OnRecall(state, frame);
    case shm::kVerified:
      return OnVerified(state, frame);
    default:
      return kUnknownType;
  }
}

bool AnswerLate(RingState* state) {
  if (!state->box->any()) return false;
  const LateAnswers late = state->box->Take();
  state->awaited.EndOpenings(late.opened.size() + late.looked_up.size());
  for (const auto& [id, request, opened] : late.opened) {
    if (opened.ok()) {
      NoteTime(Timed::kOpen, std::chrono::steady_clock::now() - request.begun);
      state->tensors.Opened(request.model, request.tokens, *opened);
    }
    AnswerOpened(state, id, opened, request.asked);
  }
  for (const LookupAnswer& answer : late.looked_up) AnswerLookedUp(state, answer);
  for (const auto& [id, status] : late.settled) {
    if (state->awaited.Answered(id))
      state->replies.Answer(id, status);  // else it has had its answer
  }
  for (const auto& [id, result] : late.built) {
    if (state->awaited.Answered(id)) AnswerBuilt(state, id, result);
  }
  return true;
}

}  // namespace kvstrata::ring
