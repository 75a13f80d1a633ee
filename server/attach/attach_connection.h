// SPDX-License-Identifier: Apache-2.0
// AttachConnection: one connection of the attach server, from accept on (attach_server.h says what
// becomes of it); ConnectionTable: all of them. Thread-safety: the loop's, but for what a lent
// connection is lent for (connection_lending.h).
#ifndef KVSTRATA_SERVER_ATTACH_ATTACH_CONNECTION_H_
#define KVSTRATA_SERVER_ATTACH_ATTACH_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/attach/peers/arena_mailbox.h"
#include "server/attach/peers/descriptor_inbox.h"
#include "server/attach/peers/peer.h"
#include "server/attach/ring/ring_session.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/options/session_types.h"

namespace kvstrata {

inline constexpr uint32_t kNoUser = ~uint32_t{0};  // the daemon's own work; a peer not yet known

struct AttachConnection {
  // kPassed: it redeemed a token, and has no ring.
  enum class State { kHandshake, kOpen, kPassed, kDetaching, kFenced };
  State state = State::kHandshake;
  uint64_t number = 0;
  PassedFd socket;  // descriptors may wait in it
  UniqueFd pidfd, doorbell;
  PeerIdentity peer;
  std::chrono::steady_clock::time_point deadline;
  uint64_t session = 0;
  std::shared_ptr<ArenaMailbox> mailbox;
  std::unique_ptr<DescriptorInbox> inbox;
  std::unique_ptr<RingSession> ring;
  // Set in one that redeemed a token. Gone when the store grants it nothing more: the session has
  // ended, or another connection took this one's place.
  std::weak_ptr<const void> granting;
  bool writes = false;  // the store counts its process as a writer
  // Another thread has it, and the loop looks at nothing of it but its state and deadline; events
  // of these kinds came meanwhile and are no longer watched.
  bool lent = false, socket_muted = false, pidfd_muted = false;
  bool end_is_long = false;
  uint32_t device = 0;
  std::function<void()> then;  // called when it comes back
  EndedSession ended;          // once it has
  // What the thread that had it says.
  RingSession::Outcome outcome = RingSession::Outcome::kIdle;
  Status status;
};

class ConnectionTable {
 public:
  using Map = std::map<uint64_t, std::unique_ptr<AttachConnection>>;

  // A new one, with the next number.
  AttachConnection* Add(PassedFd socket) {
    auto connection = std::make_unique<AttachConnection>();
    AttachConnection* const c = connection.get();
    c->number = next_number_++;
    c->socket = std::move(socket);
    all_.emplace(c->number, std::move(connection));
    return c;
  }
  // Null: it has ended.
  AttachConnection* Find(uint64_t number) const {
    const auto found = all_.find(number);
    return found == all_.end() ? nullptr : found->second.get();
  }
  void Erase(const AttachConnection* c) { all_.erase(c->number); }
  void Clear() {
    open_.clear();
    all_.clear();
  }
  const Map& all() const { return all_; }

  // Those with rings that are not lent.
  const std::vector<AttachConnection*>& open() const { return open_; }
  void Serve(AttachConnection* c) { open_.push_back(c); }
  void StopServing(AttachConnection* c) { std::erase(open_, c); }

 private:
  Map all_;
  std::vector<AttachConnection*> open_;
  uint64_t next_number_ = 1;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ATTACH_CONNECTION_H_
