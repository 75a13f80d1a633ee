// SPDX-License-Identifier: Apache-2.0
// GrpcConnections: what the daemon knows of the connections that it gave to gRPC. gRPC tells nobody
// when one of them ends, and on its own it waits for a peer that does not read or does not answer;
// so a copy of each descriptor stays here, in an epoll set that hears of the end, and shutdown(2)
// on the copies ends all of them at once. Each has its user's place (Limit::kConnections) until it
// ends.
//
// Ownership: copies; gRPC owns its descriptors. A copy lives until its connection has ended both
// ways: gRPC shuts down what it closes, and a peer that is gone has hung up. The DescriptorCloser
// closes them, because descriptors may wait in a connection (unix_listener.h); it outlives this.
// Threads: one at a time; fd() may be polled meanwhile. Cost: one descriptor and 48 bytes of kernel
// memory or so a connection; Add is a few system calls.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/options/session_types.h"
#include "server/store/options/user_limits.h"

namespace kvstrata {

using UserProcess = std::shared_ptr<const std::atomic<uint32_t>>;

class GrpcConnections {
 public:
  using Clock = std::chrono::steady_clock;

  explicit GrpcConnections(DescriptorCloser* closer) : closer_(closer) {}

  // GRPC_START (INTERNAL): the kernel gives no epoll set. Called once, first.
  Status Open();
  // Readable while Collect has something to do.
  int fd() const { return ended_.get(); }

  // Keeps a copy of a connection, and the place. DESCRIPTORS (RESOURCE_EXHAUSTED): there is none
  // for it.
  Status Add(const PeerIdentity& peer, UserPlace place, int socket);
  // Forgets connections that have ended.
  void Collect();
  // Ends all of them, for both sides, whatever was not sent yet. They are collected later.
  void CutAll();

  // Since when the user has none, if it ever had one; nothing: it has some.
  std::optional<Clock::time_point> IdleSince(uint32_t uid) const;
  void Forget(uint32_t uid) { users_.erase(uid); }

  // Which process has all connections of a user, hence made every call that arrives now; 0: there
  // are several, or none. Read from any thread; the same one for as long as the user is not
  // forgotten.
  UserProcess ProcessOf(uint32_t uid) { return users_[uid].only; }

 private:
  struct Connection {
    uint32_t uid;
    uint32_t pid;
    UserPlace place;
    PassedFd copy;
  };
  struct User {
    size_t connections = 0;
    Clock::time_point ended;               // the last one
    std::map<uint32_t, size_t> processes;  // connections of each
    std::shared_ptr<std::atomic<uint32_t>> only = std::make_shared<std::atomic<uint32_t>>(0);
  };
  void Ended(int copy);
  static void NoteProcess(User* user);

  DescriptorCloser* const closer_;
  UniqueFd ended_;
  std::unordered_map<int, Connection> connections_;  // by the copy
  std::map<uint32_t, User> users_;
};

}  // namespace kvstrata
