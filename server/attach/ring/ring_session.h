// SPDX-License-Identifier: Apache-2.0
// RingSession: the daemon's end of one client's rings. Takes frames off the ring of requests and
// has each one handled (ring_handlers.h), which asks the Store and answers.
//
// Trust: a frame is copied before it is looked at; sizes are checked against what arrived. A frame
// that breaks the format is kMalformed and costs this client its session; one that asks for
// something impossible is answered with an error and costs nothing.
// Who is answered late: answer_box.h, AwaitedRequests. Back-pressure: no more requests are taken
// while too many replies wait for room (reply_ring.h), or too many requests for the store.
//
// Ownership: its own mapping of the session segment, so that the reply to kDetach can follow the
// end of the session in the store. Thread-safety: one thread at a time (the attach server's, or one
// that it lends the session to). Cost: no system call unless the client sleeps on its reply.
//
// Quanta: the loop that serves many sessions gives each a Quantum, whose budget counts work. A
// frame that would take more, or that may wait for whoever has the store, is not taken in it
// (kElsewhere): the loop lends the session to another thread for a quantum of its own, and its ring
// is not looked at meanwhile, so that a session's frames are handled in their order and one that
// asks for much waits for itself alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "proto/ring.h"
#include "server/attach/ring/ring_handlers.h"
#include "server/store/requests/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

struct RingOptions {
  uint64_t backlog_bytes = 1 << 20;
  std::chrono::microseconds settle_timeout{60'000'000};
  std::function<void()> wake;             // the loop, from any thread; null: it polls
  std::unique_ptr<SessionImport> import;  // null: engines lend no tensors here
  SessionTensors::TakeDescriptor take_descriptor;
  PeerIdentity peer;  // whose session it is, for the log
};

// What a session may do in one go. Work is an estimate of CPU time in ns, by what frames ask for.
struct Quantum {
  uint64_t work;
  uint64_t frame_bytes;  // longer ones are left, not even copied
  bool first_unbounded;  // the first frame may take more
  bool may_wait;         // for the store; else only what needs nothing of it is handled
};
inline constexpr uint64_t kQuantumWork = 200'000;
// The loop's own; that of a session that is lent; and the last one of a client that has hung up.
inline constexpr Quantum kLoopQuantum{kQuantumWork, 32 << 10, false, true};
inline constexpr Quantum kLoopQuantumBesideLong{kQuantumWork, 32 << 10, false, false};
inline constexpr Quantum kLentQuantum{kQuantumWork, ~uint64_t{0}, true, true};
inline constexpr Quantum kLastQuantum{500 * kQuantumWork, ~uint64_t{0}, true, true};

class RingSession {
 public:
  enum class Outcome {
    kIdle,       // nothing to do, or nothing that can be done before the client reads
    kWorked,     // took at least one frame
    kDetached,   // the client detached: its sequences are closed, its reply is on its way
    kMalformed,  // the client broke the format; see malformed()
    kElsewhere,  // the next frame is not for a Quantum like this; see next_is_long()
    kFailed,     // there is no memory left even to say so; see malformed()
  };

  static Result<std::unique_ptr<RingSession>> Map(const SessionSegments& segments, Store* store,
                                                  RingOptions options);
  ~RingSession();
  RingSession(const RingSession&) = delete;
  RingSession& operator=(const RingSession&) = delete;

  Outcome Drain(const Quantum& quantum);
  // After kElsewhere: whether the frame itself takes more than a quantum.
  bool next_is_long() const { return next_is_long_; }
  // Whether ending the session takes more than a quantum.
  bool end_is_long() const;

  // Announces that the daemon is about to sleep; false when there is work and it must not.
  bool PrepareSleep();
  void CancelSleep() { requests_.CancelSleep(); }

  // Answers settles that have waited too long.
  void ExpireSettles() { state_.awaited.Expire(&state_.replies); }

  // Replies wait for room: come back without a doorbell.
  bool has_backlog() const { return state_.replies.has_backlog(); }
  uint64_t frames() const { return frames_; }
  const std::string& malformed() const { return malformed_; }

 private:
  RingSession(std::byte* base, const SessionSegments& segments, Store* store, RingOptions options);

  bool MayTake() const { return !state_.replies.full() && !state_.awaited.full(); }
  // The next frame into held_: kWorked; or what there is instead, kIdle: nothing. A frame without
  // memory for its payload is answered and passed over.
  Outcome TakeFrame(const Quantum& quantum);
  Outcome HandleHeld();
  // Answers a frame that could not be handled; `front`: what there is of its payload.
  void Fail(const shm::FrameHeader& header, std::span<const std::byte> front, const Status& why);
  uint64_t WorkOf(const shm::FrameHeader& header) const;
  Outcome OnDetach(const ring::RingFrame& frame);
  Outcome Malformed(std::string why);

  std::byte* const base_;
  const uint64_t bytes_;

  // Used by whoever serves the session.
  shm::RingConsumer requests_;
  ring::RingState state_;
  // A frame that was taken off the ring and is not handled yet, and its payload.
  std::optional<shm::FrameHeader> held_;
  std::vector<std::byte> payload_;
  bool next_is_long_ = false;
  std::string malformed_;
  uint64_t frames_ = 0;
};

}  // namespace kvstrata
