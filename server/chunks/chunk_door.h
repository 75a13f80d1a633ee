// SPDX-License-Identifier: Apache-2.0
// ChunkDoor: how a connection to the chunk socket begins: accepted, with its peer's credentials
// from the kernel before a byte of it is read, then a HELLO in time that is well formed, or a
// Refused.
//
// Ownership: owns the listener and connections that have not said HELLO. Thread-safety: none; the
// loop's. Errors of clients: PEER_UNKNOWN, CONNECTIONS, DESCRIPTORS, DESCRIPTORS_STUCK,
// EPOLL_LIMIT, HELLO_TIMEOUT, HELLO_MALFORMED, VERSION_MISMATCH.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "server/chunks/room/chunk_room.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/event_poll.h"
#include "server/sockets/packet.h"
#include "server/sockets/peer_process.h"
#include "server/sockets/unix_listener.h"
#include "server/telemetry/log.h"

namespace kvstrata {

// ChunkLink: one client's socket: its packets as they come, and those that it has not read yet.
//
// Nothing here blocks. What a socket does not take waits in order; more of that than `most` bytes
// and the client is one that does not read. A socket may hold descriptors that its peer passed, so
// a DescriptorCloser closes it (server/sockets/descriptor_closer.h).
//
// Thread-safety: none; the loop's. Cost: a system call a packet.
class ChunkLink {
 public:
  ChunkLink(PassedFd socket, uint64_t most) : socket_(std::move(socket)), most_(most) {}

  int fd() const { return socket_.get(); }
  void SetUser(uint32_t user) { socket_.set_user(user); }

  ReceiveOutcome Receive(std::span<std::byte> packet, size_t* bytes) const {
    return ReceivePlain(socket_.get(), packet, bytes);
  }
  // False: the peer is gone, or does not read.
  bool Send(std::vector<std::byte> packet);
  // When the socket takes more. False: the peer is gone.
  bool SendWaiting();
  bool has_waiting() const { return !waiting_.empty(); }

 private:
  PassedFd socket_;
  const uint64_t most_;
  std::deque<std::vector<std::byte>> waiting_;
  uint64_t waiting_bytes_ = 0;
};

struct ChunkDoorOptions {
  std::chrono::microseconds hello_timeout{2'000'000};
  uint64_t backlog_bytes = uint64_t{1} << 20;  // that wait for one client that does not read
  uint32_t connections = 256;                  // connections of one user
};

// Who is at the other end. `process` is its number, or one of ours where our namespace has none.
struct ChunkGuest {
  ChunkGuest(uint64_t connection, ChunkLink with) : number(connection), link(std::move(with)) {}

  const uint64_t number;  // names the connection; each has another
  ChunkLink link;
  PeerCredentials peer;
  uint32_t process = 0;
  UniqueFd pidfd;
  std::chrono::steady_clock::time_point deadline;  // for its HELLO
  ChunkPeer hello;                                 // what it said
  std::string client;
};

class ChunkDoor {
 public:
  // Watches with `events`, which is open and outlives it.
  ChunkDoor(const ChunkDoorOptions& options, std::unique_ptr<UnixListener> listener,
            EventPoll* events);
  ~ChunkDoor();

  void Listen() { Arm(true); }
  // Nobody comes any more, and who has not said HELLO is gone.
  void Close();
  void Accept();
  bool has(uint64_t number) const { return guests_.contains(number); }
  // Something came from a guest: whoever has said a well-formed HELLO, which is the caller's now.
  std::unique_ptr<ChunkGuest> OnSocket(uint64_t number);
  // Told why, and closed.
  void Refuse(std::unique_ptr<ChunkGuest> guest, const Status& why);
  // A connection that the caller had is gone.
  void Left(const PeerCredentials& peer);
  // Ends those that are late, and closes what waits. Called at least every 100 ms while it waits.
  void Tick();
  bool waits() const { return !listening_ || !guests_.empty() || closer_.counters().pending > 0; }

 private:
  using Clock = std::chrono::steady_clock;

  void Arm(bool on);
  void Admit(UniqueFd socket);
  Status Check(ChunkGuest* guest);
  std::unique_ptr<ChunkGuest> Take(uint64_t number);
  static Status ReadHello(std::span<const std::byte> packet, ChunkGuest* guest);

  const ChunkDoorOptions options_;
  std::unique_ptr<UnixListener> listener_;
  EventPoll* const events_;
  bool listening_ = false;
  DescriptorCloser closer_;
  LogLimiter log_{10};
  uint64_t numbers_ = 0;
  uint32_t unnumbered_ = 0;  // processes, of other namespaces
  std::map<uint64_t, std::unique_ptr<ChunkGuest>> guests_;
  std::map<uint32_t, uint32_t> connections_;  // by user, those that the caller has too
};

// ChunkProcesses: the processes behind connections of the chunk socket, each watched until it is
// dead or of no interest, by its pidfd.
//
// Thread-safety: none; the loop's. Cost: a system call or two.
class ChunkProcesses {
 public:
  explicit ChunkProcesses(EventPoll* events) : events_(events) {}

  // `pidfd` of a live process is watched from now on, if it is not already. False: the kernel
  // watches no more. REQUIRES: !IsStale(process).
  bool Add(uint32_t process, UniqueFd pidfd);
  // Whether a process of this number was watched that is dead: the number is another's now.
  bool IsStale(uint32_t process) const;
  // Whose death an event with that number tells; nothing: it is watched no more.
  std::optional<uint32_t> ProcessOf(uint64_t number) const;
  void Remove(uint32_t process);
  // Those that `wanted` is false for.
  void RemoveUnless(const std::function<bool(uint32_t process)>& wanted);
  size_t size() const { return watched_.size(); }

 private:
  struct Watched {
    UniqueFd pidfd;
    uint64_t number = 0;  // its events have it
  };

  EventPoll* const events_;
  uint64_t numbers_ = 0;
  std::map<uint32_t, Watched> watched_;
};

}  // namespace kvstrata
