// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/grpc_connections.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kvstrata {
namespace {

constexpr int kMostEnded = 64;  // at a time

}  // namespace

Status GrpcConnections::Open() {
  ended_.Reset(epoll_create1(EPOLL_CLOEXEC));
  if (ended_) return OkStatus();
  return Internal("GRPC_START", std::string("epoll: ") + std::strerror(errno));
}

Status GrpcConnections::Add(const PeerIdentity& peer, UserPlace place, int socket) {
  PassedFd copy(UniqueFd(fcntl(socket, F_DUPFD_CLOEXEC, 0)), closer_, peer.uid);
  epoll_event event{};  // it always tells EPOLLHUP, when both ways are shut
  event.data.fd = copy.get();
  if (!copy || epoll_ctl(ended_.get(), EPOLL_CTL_ADD, copy.get(), &event) != 0) {
    return ResourceExhausted("DESCRIPTORS",
                             std::string("a connection's copy: ") + std::strerror(errno));
  }
  const int number = copy.get();
  connections_.emplace(number, Connection{peer.uid, peer.pid, std::move(place), std::move(copy)});
  User& user = users_[peer.uid];
  ++user.connections;
  ++user.processes[peer.pid];
  NoteProcess(&user);
  return OkStatus();
}

std::optional<GrpcConnections::Clock::time_point> GrpcConnections::IdleSince(uint32_t uid) const {
  const auto found = users_.find(uid);
  if (found == users_.end()) return Clock::time_point::min();
  if (found->second.connections != 0) return std::nullopt;
  return found->second.ended;
}

void GrpcConnections::Collect() {
  epoll_event events[kMostEnded];
  const int n = epoll_wait(ended_.get(), events, kMostEnded, 0);
  for (int i = 0; i < n; ++i) Ended(events[i].data.fd);
}

void GrpcConnections::Ended(int copy) {
  const auto found = connections_.find(copy);
  // Closing alone does not take it out of the set while gRPC has the same socket open.
  epoll_ctl(ended_.get(), EPOLL_CTL_DEL, copy, nullptr);
  User& user = users_[found->second.uid];
  if (--user.connections == 0) user.ended = Clock::now();
  if (--user.processes[found->second.pid] == 0) user.processes.erase(found->second.pid);
  NoteProcess(&user);
  connections_.erase(found);
}

void GrpcConnections::NoteProcess(User* user) {
  *user->only = user->processes.size() == 1 ? user->processes.begin()->first : 0;
}

void GrpcConnections::CutAll() {
  for (const auto& [number, connection] : connections_) shutdown(number, SHUT_RDWR);
}

}  // namespace kvstrata
