// SPDX-License-Identifier: Apache-2.0
// ReplyRing: the answers to one client, on their way to it.
//
// What the ring does not take waits here, in order. While more waits than a limit, the session
// takes no more requests. Thread-safety: whoever serves the session. Cost: an answer that the ring
// takes allocates nothing; a system call only if the client sleeps on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <vector>

#include "base/status.h"
#include "proto/ring.h"
#include "server/telemetry/refusals.h"

namespace kvstrata {

// Reads a POD from the front of a frame, which was copied out of a ring, and takes it off. False
// here and below: the frame is shorter than what it promises.
template <typename T>
bool Take(std::span<const std::byte>* in, T* out) {
  if (in->size() < sizeof(T)) return false;
  std::memcpy(out, in->data(), sizeof(T));
  *in = in->subspan(sizeof(T));
  return true;
}

// The same where it is all of the frame.
template <typename T>
bool TakeWhole(std::span<const std::byte> in, T* out) {
  return Take(&in, out) && in.empty();
}

// Takes `n` values; the frame's buffer is aligned and all arrays start at a multiple of 4.
template <typename T>
bool TakeArray(std::span<const std::byte>* in, uint64_t n, std::span<const T>* out) {
  if (n > in->size() / sizeof(T)) return false;
  *out = {reinterpret_cast<const T*>(in->data()), n};
  *in = in->subspan(n * sizeof(T));
  return true;
}

template <typename T>
std::span<const std::byte> BytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

class ReplyRing {
 public:
  // `client`: whom refusals are for; its texts are constants.
  ReplyRing(shm::RingProducer ring, uint64_t backlog_bytes, const Refused& client)
      : ring_(ring), backlog_bytes_(backlog_bytes), client_(client) {}

  // One that is not OK is counted and told in the log as a refusal.
  void Answer(uint64_t id, const Status& status, std::span<const std::byte> head = {},
              std::span<const std::byte> tail = {});
  // Has the ring take what waits, as far as it has room.
  void Flush();

  bool has_backlog() const { return !backlog_.empty(); }
  // More waits than the limit.
  bool full() const { return backlog_used_ > backlog_bytes_; }
  // Bytes of the largest frame, its header included.
  uint64_t max_frame() const { return ring_.max_frame(); }

 private:
  struct Waiting {
    uint64_t id;
    std::vector<std::byte> bytes;  // ErrorReply and payload
  };

  bool TryPush(uint64_t id, std::span<const std::byte> reply, std::span<const std::byte> head,
               std::span<const std::byte> tail);

  shm::RingProducer ring_;
  const uint64_t backlog_bytes_;
  const Refused client_;
  std::deque<Waiting> backlog_;
  uint64_t backlog_used_ = 0;
};

}  // namespace kvstrata
