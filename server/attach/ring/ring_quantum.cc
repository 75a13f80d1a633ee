// SPDX-License-Identifier: Apache-2.0
// A session's quanta: how much of its ring is handled in one go, by whom, and what becomes of a
// frame for which there is no memory.
#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "server/attach/ring/reply_ring.h"
#include "server/attach/ring/ring_session.h"

namespace kvstrata {
namespace {

// Estimates in ns. A loop's quantum takes some 64 small frames, or hashes 12,000 token ids.
constexpr uint64_t kFrameWork = 3'000;
constexpr uint64_t kByteWork = 4;    // a payload's byte: ids are hashed, values copied
constexpr uint64_t kTokenWork = 20;  // a sequence's token: its pages are taken, shared or released

constexpr size_t kKeptBytes = 64 << 10;  // memory for payloads, between frames

Status NoMemory() {
  return ResourceExhausted("MEMORY", "the daemon has no memory for this request; raise its limit");
}

}  // namespace

RingSession::Outcome RingSession::Drain(const Quantum& quantum) {
  const AnswerBox::Serving serving(state_.box.get());
  try {
    state_.replies.Flush();
    Outcome outcome = ring::AnswerLate(&state_) ? Outcome::kWorked : Outcome::kIdle;
    for (uint64_t spent = 0; spent < quantum.work && MayTake();) {
      const Outcome taken = TakeFrame(quantum);
      if (taken == Outcome::kIdle) return outcome;
      if (taken != Outcome::kWorked) return taken;
      if (!held_) continue;  // there was no memory for it
      const uint64_t work = WorkOf(*held_);
      next_is_long_ = work > kQuantumWork;
      if (spent > 0 && spent + work > quantum.work) return Outcome::kWorked;
      if (work > quantum.work && !quantum.first_unbounded) return Outcome::kElsewhere;
      if (!quantum.may_wait && held_->type != shm::kPing) return Outcome::kElsewhere;
      spent += work;
      outcome = HandleHeld();
      if (outcome != Outcome::kWorked) return outcome;
    }
    return outcome;
  } catch (const std::exception& error) {
    malformed_ = error.what();
    return Outcome::kFailed;
  }
}

RingSession::Outcome RingSession::TakeFrame(const Quantum& quantum) {
  if (held_) return Outcome::kWorked;
  shm::FrameHeader header{};
  try {
    switch (requests_.Pop(&header, &payload_, quantum.frame_bytes)) {
      case shm::RingConsumer::Outcome::kEmpty:
        return Outcome::kIdle;
      case shm::RingConsumer::Outcome::kCorrupt:
        return Malformed("corrupt frame header");
      case shm::RingConsumer::Outcome::kLarge:
        next_is_long_ = true;
        return Outcome::kElsewhere;
      case shm::RingConsumer::Outcome::kFrame:
        held_ = header;
    }
  } catch (const std::bad_alloc&) {
    std::array<std::byte, sizeof(uint64_t)> front{};
    (void)requests_.PopFront(&header, front);
    ++frames_;
    Fail(header, front, NoMemory());
  }
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::HandleHeld() {
  const shm::FrameHeader header = *std::exchange(held_, std::nullopt);
  ++frames_;
  if (header.type < shm::kCommit && header.id == 0) return Malformed("request without an id");
  const ring::Handler handler = ring::HandlerOf(header.type);
  const bool detaches = header.type == shm::kDetach;
  if (handler == nullptr && !detaches) {
    return Malformed("unknown message type " + std::to_string(header.type));
  }
  const size_t opening = state_.awaited.opening();
  const auto fail = [&](const Status& why) {
    state_.awaited.DropOpenings(opening);
    Fail(header, payload_, why);
  };
  try {
    if (detaches) return OnDetach({header, payload_});
    if (const char* const why = handler(&state_, {header, payload_})) return Malformed(why);
  } catch (const std::bad_alloc&) {
    fail(NoMemory());
  } catch (const std::length_error&) {
    fail(NoMemory());
  } catch (const std::system_error& error) {
    fail(ResourceExhausted("THREADS", std::string("the daemon is out of threads, descriptors or "
                                                  "locks: ") +
                                          error.what()));
  }
  if (payload_.capacity() > kKeptBytes) std::vector<std::byte>().swap(payload_);
  return Outcome::kWorked;
}

void RingSession::Fail(const shm::FrameHeader& header, std::span<const std::byte> front,
                       const Status& why) {
  state_.awaited.Answered(header.id);
  if (header.id != 0) return state_.replies.Answer(header.id, why);
  if (uint64_t sequence = 0; Take(&front, &sequence)) state_.sequences.NoteEvent(sequence, why);
}

uint64_t RingSession::WorkOf(const shm::FrameHeader& header) const {
  const uint64_t work = kFrameWork + kByteWork * payload_.size();
  std::span<const std::byte> front = payload_;
  shm::OpenSequence open{};
  shm::Grow grow{};
  uint64_t sequence = 0;
  switch (header.type) {
    case shm::kOpenSequence:
      // What is reserved beyond the prompt is taken like it.
      if (!Take(&front, &open)) return work;
      return work + kTokenWork *
                        std::max<uint64_t>(payload_.size() / sizeof(int32_t), open.reserve_tokens);
    case shm::kLookup:
      return work + kTokenWork * (payload_.size() / sizeof(int32_t));
    case shm::kForkSequence:
    case shm::kTruncate:  // writes the table anew
    case shm::kCloseSequence:
    case shm::kPrefillDone:
    case shm::kBuild:  // looks at every page, and hashes a key for each block that is there
      return Take(&front, &sequence) ? work + kTokenWork * state_.sequences.TokensOf(sequence)
                                     : work;
    case shm::kGrow: {
      if (!Take(&front, &grow)) return work;
      const uint64_t covered = state_.sequences.TokensOf(grow.sequence);
      // A table that grows is written anew.
      return work + covered + kTokenWork * (grow.tokens - std::min<uint64_t>(grow.tokens, covered));
    }
    case shm::kRegisterTensors:  // opens and maps memory, a GPU's perhaps
      return kQuantumWork + work;
    case shm::kDetach:
      return end_is_long() ? kQuantumWork + work : work;
    default:
      return work;
  }
}

bool RingSession::end_is_long() const {
  return state_.sequences.WorkToClose(kFrameWork, kTokenWork) > kQuantumWork;
}

}  // namespace kvstrata
