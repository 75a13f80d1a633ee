#include "server/rpc/grpc_connections.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace kvstrata {
namespace {

constexpr int kEvents = 64;  // at a time

}  // namespace

Status GrpcConnections::Open() {
  ended_.Reset(epoll_create1(EPOLL_CLOEXEC));
  if (ended_) return OkStatus();
  return Internal("GRPC_START", std::string("epoll: ") + std::strerror(errno));
}

size_t GrpcConnections::OfUser(uint32_t uid) const {
  const auto found = of_user_.find(uid);
  return found == of_user_.end() ? 0 : found->second;
}

Status GrpcConnections::Admit(uint32_t uid) const {
  if (OfUser(uid) < kMaxOfUser) return OkStatus();
  return ResourceExhausted("CONNECTIONS", "user " + std::to_string(uid) + " has " +
                                              std::to_string(kMaxOfUser) +
                                              " gRPC connections, which is all that one may "
                                              "have; close some");
}

Status GrpcConnections::Add(uint32_t uid, int socket) {
  UniqueFd copy(fcntl(socket, F_DUPFD_CLOEXEC, 0));
  epoll_event event{};  // of itself: EPOLLHUP, when both ways are shut
  event.data.fd = copy.get();
  if (!copy || epoll_ctl(ended_.get(), EPOLL_CTL_ADD, copy.get(), &event) != 0) {
    return ResourceExhausted("DESCRIPTORS",
                             std::string("a connection's copy: ") + std::strerror(errno));
  }
  const int number = copy.get();
  connections_.emplace(number, Connection{uid, std::move(copy)});
  ++of_user_[uid];
  return OkStatus();
}

void GrpcConnections::Collect() {
  epoll_event events[kEvents];
  const int n = epoll_wait(ended_.get(), events, kEvents, 0);
  for (int i = 0; i < n; ++i) Ended(events[i].data.fd);
}

void GrpcConnections::Ended(int copy) {
  const auto found = connections_.find(copy);
  // Closing alone does not take it out of the set while gRPC has the same socket open.
  epoll_ctl(ended_.get(), EPOLL_CTL_DEL, copy, nullptr);
  const auto user = of_user_.find(found->second.uid);
  if (--user->second == 0) of_user_.erase(user);
  connections_.erase(found);
}

void GrpcConnections::CutAll() {
  for (const auto& [number, connection] : connections_) shutdown(number, SHUT_RDWR);
}

}  // namespace kvstrata
