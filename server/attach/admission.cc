// SPDX-License-Identifier: Apache-2.0
#include "server/attach/admission.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "base/descriptors.h"
#include "server/attach/peers/peer.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxAcceptsPerIteration = 16;
constexpr int kMaxHandshakesPerUser = 64;
constexpr uint64_t kDescriptorsOfSession = 5;

}  // namespace

void Admission::Arm(bool on) {
  if (!on) {
    state_->events.Unwatch(listener_->fd());
    listening_ = false;
  } else if (state_->events.Watch(listener_->fd(), EventPoll::kListener, 0, EPOLLIN)) {
    listening_ = true;
  }
}

void Admission::Accept() {
  for (int i = 0; i < kMaxAcceptsPerIteration; ++i) {
    UniqueFd socket(accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      AdmitSocket(std::move(socket));
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // Spinning here would help nobody; the next tick tries again.
      uint64_t suppressed = 0;
      const int error = errno;
      if (state_->MayLog(&suppressed)) {
        LogEvent(LogLevel::kError, "accept_failed",
                 {{"errno", error}, {"why", std::strerror(error)}, {"suppressed", suppressed}});
      }
      Arm(false);
    }
    return;
  }
}

void Admission::AdmitSocket(UniqueFd socket) {
  state_->counts.Count(AttachCounts::kAccepted);
  AttachConnection* const c =
      state_->connections.Add(PassedFd(std::move(socket), &state_->closer, kNoUser));
  c->deadline = Clock::now() + state_->hello_timeout.load();
  Result<Peer> peer = PeerOf(c->socket.get());
  if (!peer.ok()) return ends_->Refuse(c, peer.status());
  c->peer = peer.value().identity;
  c->pidfd = std::move(peer.value().pidfd);
  c->socket.set_user(c->peer.uid);
  if (!state_->closer.MayTake(c->peer.uid)) {
    return ends_->Refuse(
        c, ResourceExhausted("DESCRIPTORS_STUCK",
                             "descriptors that clients of user " + std::to_string(c->peer.uid) +
                                 " passed do not close; end who keeps them open"));
  }
  if (!state_->store->user_limits()->IsOperator(c->peer.tenant)) {
    const Status spare = CheckDescriptors(kDescriptorsOfSession);
    if (!spare.ok()) return ends_->Refuse(c, spare);
  }
  const auto same_user = [c](const auto& entry) {
    const AttachConnection& other = *entry.second;
    return other.state == AttachConnection::State::kHandshake && other.peer.uid == c->peer.uid;
  };
  if (std::ranges::count_if(state_->connections.all(), same_user) > kMaxHandshakesPerUser) {
    return ends_->Refuse(c, ResourceExhausted("TOO_MANY_HANDSHAKES",
                                              "user " + std::to_string(c->peer.uid) + " has " +
                                                  std::to_string(kMaxHandshakesPerUser) +
                                                  " connections that have not said Hello; retry"));
  }
  if (!state_->WatchSocket(c) || !state_->WatchPidfd(c)) {
    ends_->Refuse(c, ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections"));
  }
}

}  // namespace kvstrata
