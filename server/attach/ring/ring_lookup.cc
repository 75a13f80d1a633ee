// SPDX-License-Identifier: Apache-2.0
// Look-ups of a session: answered at once, but where a plan's parameters are to be read first, or a
// lease reads what it is to hold; what it has room for; and what a plan's text means.
#include <chrono>
#include <cstring>

#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/ring_handlers.h"
#include "server/sockets/packet.h"
#include "server/telemetry/traffic.h"

namespace kvstrata::ring {
namespace {

shm::Room MessageOf(const Room& room) { return {room.tokens, room.bytes}; }

shm::PoolCapacity MessageOf(const PoolCapacity& pool) {
  return {MessageOf(pool.free), MessageOf(pool.after_eviction), MessageOf(pool.limit)};
}

using Clock = std::chrono::steady_clock;

}  // namespace

Malformed OnCapacity(RingState* state, const RingFrame& frame) {
  shm::Capacity in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return "Capacity of a wrong size";
  }
  const Result<Capacity> room = state->store->capacity().CountCapacity(
      state->session, in.model, {plan.data(), strnlen(plan.data(), plan.size())});
  if (!room.ok()) {
    state->replies.Answer(frame.header.id, room.status());
    return kHandled;
  }
  const shm::CapacityReply reply{MessageOf(room->device), MessageOf(room->host), room->open_tokens,
                                 0};
  state->replies.Answer(frame.header.id, OkStatus(), BytesOf(reply));
  return kHandled;
}

Malformed OnPlanText(RingState* state, const RingFrame& frame) {
  shm::PlanText in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return "PlanText of a wrong size";
  }
  const Result<Plan> named =
      state->store->plans().ResolvePlan({plan.data(), strnlen(plan.data(), plan.size())});
  const std::string text = named.ok() ? FormatPlan(*named) : "";
  state->replies.Answer(frame.header.id, named.status(), std::as_bytes(std::span(text)));
  return kHandled;
}

Malformed OnLookup(RingState* state, const RingFrame& frame) {
  shm::Lookup in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  std::span<const int32_t> tokens;
  LookupPlan open;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty() ||
      !ReadText(in.device_uuid, &open.device)) {
    return "Lookup of a wrong size";
  }
  open.plan.assign(plan.data(), strnlen(plan.data(), plan.size()));
  state->awaited.BeginOpening();
  state->store->leases().LookupLeased(
      state->session, in.model, tokens, open, std::chrono::milliseconds(in.lease_ms),
      [box = state->box, id = frame.header.id, begun = Clock::now()](const Result<PrefixHit>& hit) {
        box->PutLookedUp(id, begun, hit);
      });
  AnswerLate(state);
  return kHandled;
}

void AnswerLookedUp(RingState* state, const LookupAnswer& answer) {
  if (!answer.status.ok()) return state->replies.Answer(answer.id, answer.status);
  NoteTime(Timed::kLookup, Clock::now() - answer.begun);
  state->replies.Answer(answer.id, OkStatus(), BytesOf(answer.reply),
                        std::as_bytes(std::span(answer.plan)));
}

}  // namespace kvstrata::ring
