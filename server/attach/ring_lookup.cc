// Look-ups of a session: answered at once, but where a plan's parameters are to be read first, or a
// lease reads what it is to hold; and what it has room for.
#include <cstring>
#include <utility>

#include "server/attach/frame_reader.h"
#include "server/attach/packet.h"
#include "server/attach/ring_session.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

shm::Room MessageOf(const Room& room) { return {room.tokens, room.bytes}; }

shm::PoolCapacity MessageOf(const PoolCapacity& pool) {
  return {MessageOf(pool.free), MessageOf(pool.after_eviction), MessageOf(pool.limit)};
}

using Clock = std::chrono::steady_clock;

}  // namespace

RingSession::Outcome RingSession::OnCapacity(const Frame& frame) {
  shm::Capacity in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return Malformed("Capacity of a wrong size");
  }
  const Result<Capacity> room = store_->capacity().CountCapacity(
      session_, in.model, {plan.data(), strnlen(plan.data(), plan.size())});
  if (!room.ok()) {
    Answer(frame.header.id, room.status());
    return Outcome::kWorked;
  }
  const shm::CapacityReply reply{MessageOf(room->device), MessageOf(room->host), room->open_tokens,
                                 0};
  Answer(frame.header.id, OkStatus(), BytesOf(reply));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnLookup(const Frame& frame) {
  shm::Lookup in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  std::span<const int32_t> tokens;
  LookupPlan open;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty() ||
      !ReadText(in.device_uuid, &open.device)) {
    return Malformed("Lookup of a wrong size");
  }
  open.plan.assign(plan.data(), strnlen(plan.data(), plan.size()));
  ++opening_;
  store_->leases().LookupLeased(
      session_, in.model, tokens, open, std::chrono::milliseconds(in.lease_ms),
      [box = box_, id = frame.header.id, begun = Clock::now()](const Result<PrefixHit>& hit) {
        box->PutLookedUp(id, begun, hit);
      });
  AnswerLate();
  return Outcome::kWorked;
}

void RingSession::AnswerBox::PutLookedUp(uint64_t id, Clock::time_point begun,
                                         const Result<PrefixHit>& hit) {
  LookedUp answer{id, hit.status(), {}, "", begun};
  if (hit.ok()) {
    if (hit->plan) answer.plan = FormatPlan(*hit->plan);
    answer.reply = {hit->held_tokens(),
                    hit->indexed_tokens,
                    hit->tokens_in(Tier::kDevice),
                    hit->tokens_in(Tier::kHost),
                    hit->tokens_in(Tier::kDisk),
                    static_cast<uint32_t>(answer.plan.size())};
  }
  {
    MutexLock lock(mu);
    looked_up.push_back(std::move(answer));
  }
  Tell();
}

void RingSession::AnswerLookedUp(const LookedUp& answer) {
  if (!answer.status.ok()) return Answer(answer.id, answer.status);
  NoteTime(Timed::kLookup, Clock::now() - answer.begun);
  Answer(answer.id, OkStatus(), BytesOf(answer.reply), std::as_bytes(std::span(answer.plan)));
}

}  // namespace kvstrata
