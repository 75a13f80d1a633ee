// SPDX-License-Identifier: Apache-2.0
// Who uses a sequence, and what the daemon is told of it: events, posted at once or when the GPU is
// done (linked_session.h).
#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "client/linked/linked_session.h"

namespace kvstrata::client {

Result<std::shared_ptr<Sequence>> Session::State::Find(uint64_t sequence) {
  std::lock_guard<std::mutex> lock(mu);
  const auto it = sequences.find(sequence);
  if (it == sequences.end()) {
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) +
                        " is not open in this session: it was closed, or is another session's");
  }
  return it->second;
}

Result<SequenceUse> SequenceUse::Of(Session::State* session, uint64_t sequence, bool in_step_too) {
  KVS_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> s, session->Find(sequence));
  std::unique_lock<std::mutex> lock(s->mu, std::try_to_lock);
  if (!lock.owns_lock()) {
    return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(sequence) +
                                                   " is in use by another thread; one at a time");
  }
  if (s->in_step && !in_step_too) {
    return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(sequence) +
                                                   " is in an open step; end or abort it first");
  }
  return SequenceUse(std::move(s), std::move(lock));
}

Result<SequenceUse> SequenceUse::Current(Session::State* session, uint64_t sequence,
                                         bool in_step_too) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, Of(session, sequence, in_step_too));
  KVS_RETURN_IF_ERROR(s->unanswered);
  KVS_RETURN_IF_ERROR(session->TruncateAsAsked(s.get()));
  return s;
}

Status Session::State::TruncateAsAsked(Sequence* s) {
  if (s->in_step || s->late_tokens > 0) return OkStatus();
  const std::optional<uint32_t> asked = tables->TruncateTo(*s);
  return asked ? Truncate(s, *asked) : OkStatus();
}

Status Session::State::Tell(Sequence* s, shm::MessageType type,
                            std::initializer_list<std::span<const std::byte>> parts) {
  KVS_RETURN_IF_ERROR(TellDone(s));
  if (s->deferred.empty()) return ring->Post(type, parts);
  Sequence::Deferred& event = s->deferred.emplace_back();
  event.type = type;
  for (const auto& part : parts)
    event.message.insert(event.message.end(), part.begin(), part.end());
  return OkStatus();
}

bool Session::State::Waits(const Sequence::Deferred& event) const {
  return event.reader_slot >= 0 && !gpu_session->Done(event.reader_slot, event.number);
}

namespace {

void MarkPrivate(Sequence::Deferred* commit) {
  shm::Commit event;
  std::memcpy(&event, commit->message.data(), sizeof(event));
  event.flags |= shm::Commit::kPrivate;
  std::memcpy(commit->message.data(), &event, sizeof(event));
}

}  // namespace

// Rows that are not finite are known of when the GPU is done with them, hence before the daemon is
// told of them: nobody finds them. The sequence itself goes on.
Status Session::State::TellDone(Sequence* s) {
  for (; !s->deferred.empty(); s->deferred.pop_front()) {
    Sequence::Deferred& event = s->deferred.front();
    if (Waits(event) || event.missing > 0) break;
    if (event.audit != 0) OfferShadow(s, event);
    if (event.type == shm::kPad) continue;
    const bool commit = event.type == shm::kCommit && gpu_session != nullptr;
    if (commit && gpu_session->WroteNotFinite(s->slot)) MarkPrivate(&event);
    KVS_RETURN_IF_ERROR(ring->Post(event.type, {std::span(event.message)}));
  }
  return OkStatus();
}

Status Session::State::TellAll(Sequence* s, std::chrono::steady_clock::time_point deadline) {
  while (true) {
    KVS_RETURN_IF_ERROR(TellDone(s));
    if (s->deferred.empty()) return OkStatus();
    // One that waited for the GPU a moment ago may be done by now: it lacks no ids.
    if (s->deferred.front().missing > 0 &&
        std::ranges::none_of(s->deferred, [&](const auto& e) { return Waits(e); })) {
      return IdsMissing(*s);
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return {Code::kDeadlineExceeded, "DEADLINE",
              "the GPU did not finish the steps of sequence " + std::to_string(s->id) + " in " +
                  std::to_string(options.timeout.count()) +
                  " ms; synchronise the stream, or raise timeout_ms"};
    }
    // Nothing wakes a thread when the GPU writes memory.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Session::State::OfferRecall(Sequence* s, uint32_t audit, int32_t position,
                                 const ShadowSample& sample, uint32_t flags) {
  const bool measured = !sample.layers.empty();
  const shm::Recall event{s->id,
                          audit,
                          static_cast<uint32_t>(position),
                          static_cast<uint32_t>(sample.layers.size()),
                          measured ? static_cast<uint32_t>(s->state->geometry().query_heads) : 0,
                          flags | (sample.raw_gone ? uint32_t{shm::Recall::kRawGone} : 0),
                          s->recall_dropped};
  const auto bytes = [](const auto& array) { return std::as_bytes(std::span(array)); };
  if (!ring->Offer(shm::kRecall, {BytesOf(event), bytes(sample.layers), bytes(sample.recall),
                                  bytes(sample.error)})) {
    ++s->recall_dropped;
  }
}

void Session::State::OfferShadow(Sequence* s, const Sequence::Deferred& event) {
  s->shadow_waits = false;
  if (s->shadow->captured()) {
    OfferRecall(s, event.audit, event.position, {}, shm::Recall::kCaptured);
  } else if (s->shadow->lost()) {
    ++s->recall_dropped;
  } else {
    OfferRecall(s, event.audit, event.position, s->shadow->Read(), 0);
  }
}

Status Session::State::TellIndexed(Sequence* s) {
  return kvstrata::TellIndexed(s, [&](uint32_t first, uint32_t indexed) {
    const shm::Commit commit{s->id, first, 0, indexed, 0};
    return ring->Post(shm::kCommit, {BytesOf(commit)});
  });
}

}  // namespace kvstrata::client
