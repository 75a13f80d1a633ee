// SPDX-License-Identifier: Apache-2.0
// RingClient: a session's requests and events over its two rings (proto/ring_messages.h).
//
// Threads: any, side by side; requests and events wait for the moment of another push alone.
// Lock order: calls_mu_, then post_mu_.
// Errors: DAEMON_GONE (UNAVAILABLE) within a slice of 10 ms after the daemon's end, DEADLINE
// (DEADLINE_EXCEEDED), or what the daemon replied.
// Cost: a call spins 20 us for its reply, yielding its core after 4, then sleeps; an event is one
// copy into the ring. No system call while the daemon's ring server is awake.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "client/linked/attach.h"
#include "proto/ring.h"
#include "proto/ring_messages.h"

namespace kvstrata::client {

using Parts = std::initializer_list<std::span<const std::byte>>;

template <typename T>
std::span<const std::byte> BytesOf(const T& pod) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&pod, 1));
}

Status DaemonGone();  // UNAVAILABLE DAEMON_GONE

class RingClient {
 public:
  using Clock = std::chrono::steady_clock;

  // `connection` outlives this.
  RingClient(Connection* connection, std::chrono::milliseconds timeout);

  // Token ids (4 bytes each) that fit one frame beside its structs.
  size_t max_tokens() const { return (producer_.max_frame() - 1024) / sizeof(int32_t); }

  // Sends a request, waits for its reply; the reply's payload goes to `payload` (may be null).
  // Calls of other threads go on meanwhile.
  Status Call(shm::MessageType type, Parts parts, std::vector<std::byte>* payload);

  // A request whose reply begins with a T. REPLY_INVALID.
  template <typename T>
  Result<T> Ask(shm::MessageType type, Parts parts) {
    std::vector<std::byte> payload;
    KVS_RETURN_IF_ERROR(Call(type, parts, &payload));
    return ReadReply<T>(payload);
  }
  // A request about a sequence that says nothing more.
  Status CallOf(shm::MessageType type, uint64_t sequence,
                std::vector<std::byte>* payload = nullptr) {
    return Call(type, {BytesOf(shm::SequenceRef{sequence})}, payload);
  }
  // What a payload begins with. REPLY_INVALID.
  template <typename T>
  static Result<T> ReadReply(std::span<const std::byte> payload) {
    T reply{};
    if (payload.size() < sizeof(T)) return ReplyInvalid();
    std::memcpy(&reply, payload.data(), sizeof(T));
    return reply;
  }
  static Status ReplyInvalid();

  // Sends an event; with an id, and a deadline of its own, a request.
  Status Post(shm::MessageType type, Parts parts, uint64_t id = 0,
              std::optional<Clock::time_point> until = {});

  // Sends an event if that needs no waiting and leaves half the ring to others; whether it did.
  bool Offer(shm::MessageType type, Parts parts);

 private:
  // A call that waits: its thread reads the ring, or another call's thread does, which then hands
  // over what it finds, and the reading when its own reply has come.
  struct Waiting {
    shm::MessageType type;
    std::vector<std::byte> frame;
    bool answered = false;
    std::condition_variable ready;  // its reply is there, or nobody reads the ring
  };

  void NoteFull();
  Status AwaitReply(Waiting* own, Clock::time_point deadline);
  // Somebody who waits reads the ring, unless somebody does. REQUIRES: calls_mu_ is held.
  void PassOnReading();
  // Reads until `own` is answered. REQUIRES: this thread reads the ring.
  Status Read(Waiting* own, Clock::time_point deadline);
  // Takes one frame to whom it answers. False: there is none.
  Result<bool> TakeFrame();
  // A reply that nobody waits for any more. A sequence that it opened is closed again.
  void DropStale(uint64_t id, const std::vector<std::byte>& frame);

  Connection* const connection_;
  const std::chrono::milliseconds timeout_;

  std::mutex calls_mu_;  // guards the four below
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Waiting*> waiting_;
  std::unordered_map<uint64_t, uint32_t> timed_out_;  // id -> request type
  bool reading_ = false;                              // a thread reads the ring

  // Used by the thread that reads.
  shm::RingConsumer consumer_;
  std::vector<std::byte> frame_;

  std::timed_mutex post_mu_;  // guards producer_
  shm::RingProducer producer_;
};

}  // namespace kvstrata::client
