// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/ring_handlers.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "server/telemetry/traffic.h"

namespace kvstrata::ring {

namespace {

Malformed OnPing(RingState* state, const RingFrame& frame) {
  if (!frame.payload.empty()) return "Ping with a payload";
  state->replies.Answer(frame.header.id, OkStatus());
  return kHandled;
}

constexpr std::pair<shm::MessageType, Handler> kHandlers[] = {
    {shm::kPing, OnPing},
    {shm::kRegisterModel, OnRegisterModel},
    {shm::kOpenSequence, OnOpen},
    {shm::kForkSequence, OnFork},
    {shm::kCloseSequence, OnClose},
    {shm::kGrow, OnGrow},
    {shm::kTruncate, OnTruncate},
    {shm::kCloseKey, OnCloseKey},
    {shm::kTruncateKey, OnTruncateKey},
    {shm::kSettle, OnSettle},
    {shm::kLookup, OnLookup},
    {shm::kCapacity, OnCapacity},
    {shm::kRegisterTensors, OnRegisterTensors},
    {shm::kSealBlocks, OnSealBlocks},
    {shm::kAcknowledged, OnAcknowledged},
    {shm::kPlanText, OnPlanText},
    {shm::kBuild, OnBuild},
    {shm::kRecompress, OnRecompress},
    {shm::kCancelWork, OnCancelWork},
    {shm::kCommit, OnCommit},
    {shm::kReport, OnReport},
    {shm::kPrefillDone, OnPrefillDone},
    {shm::kRecall, OnRecall},
    {shm::kVerified, OnVerified},
};

}  // namespace

Handler HandlerOf(uint32_t type) {
  const auto found = std::ranges::find(kHandlers, type, [](const auto& row) { return row.first; });
  return found == std::end(kHandlers) ? nullptr : found->second;
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
