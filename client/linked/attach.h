// SPDX-License-Identifier: Apache-2.0
// Connection: the attach socket (PATH.attach) of a session. Dials, shakes hands, verifies and maps
// the session's two segments, hands arenas to a PageMap as they arrive, and notices the daemon's
// end.
//
// Ownership: owns the socket, the doorbell and both mappings. The socket is the session's lease.
// Threads: Poll, gone and RingDoorbell from any thread.
// Cost: Poll is one non-blocking recvmsg; Dial waits at most `timeout`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "client/linked/page_map.h"
#include "proto/attach_messages.h"
#include "proto/shm_layout.h"

namespace kvstrata::client {

// What a message's field says.
template <size_t N>
std::string TextOf(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

class Connection {
 public:
  // `path` is the daemon's PATH. Errors: SOCKET_INVALID (a directory, too long),
  // DAEMON_UNREACHABLE, VERSION_MISMATCH, SEGMENT_INVALID, PERMISSION_DENIED, or the daemon's
  // refusal.
  static Result<std::unique_ptr<Connection>> Dial(const std::string& path,
                                                  const std::string& device_uuid,
                                                  const std::string& client_name,
                                                  std::chrono::milliseconds timeout,
                                                  PageMap* arenas);

  const shm::Welcome& welcome() const { return welcome_; }
  shm::SessionHeader* session() const {
    return reinterpret_cast<shm::SessionHeader*>(session_.data());
  }
  const shm::TableHeader* tables() const {
    return reinterpret_cast<const shm::TableHeader*>(table_.data());
  }
  uint64_t session_bytes() const { return session_.bytes(); }
  uint64_t table_bytes() const { return table_.bytes(); }

  // Takes what has arrived, without waiting. False once the daemon is gone, for ever.
  bool Poll() KVS_EXCLUDES(mu_);
  // Waits at most 10 ms for a packet. False at the deadline, or once the daemon is gone.
  bool AwaitPacket(std::chrono::steady_clock::time_point deadline) KVS_EXCLUDES(mu_);
  bool gone() const { return gone_.load(std::memory_order_relaxed); }
  // The daemon broke the protocol: treat it as gone.
  void GiveUp() { gone_.store(true, std::memory_order_relaxed); }

  void RingDoorbell();
  // Sends a descriptor that a request is about to name. DAEMON_GONE, DEADLINE.
  Status SendDescriptor(uint32_t number, int fd, std::chrono::steady_clock::time_point deadline);
  // In a child of fork(): closes descriptors, forgets mappings, touches nothing shared.
  void AbandonAfterFork();

 private:
  explicit Connection(PageMap* arenas) : arenas_(arenas) {}
  Status Handshake(const shm::Hello& hello, std::chrono::steady_clock::time_point deadline);
  Status TakeWelcome(const std::byte* packet, size_t bytes, UniqueFd (&fds)[3], int fd_count);
  Status VerifySegments() const;

  PageMap* const arenas_;
  shm::Welcome welcome_{};
  UniqueFd doorbell_;
  Mapping session_, table_;
  std::atomic<bool> gone_{false};

  Mutex mu_;  // one reader of the socket at a time
  UniqueFd socket_;
};

}  // namespace kvstrata::client
