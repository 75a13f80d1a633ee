// SPDX-License-Identifier: Apache-2.0
#include "server/sockets/peer_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; newer than Debian 12's headers
#endif

namespace kvstrata {
namespace {

constexpr uint32_t kOverflowUid = 65534;

Status Unknown(std::string message) {
  return {Code::kUnauthenticated, "PEER_UNKNOWN", std::move(message)};
}

// Inside a user namespace that does not map it, uid 65534 stands for every foreign user.
bool OverflowUidIsMapped() {
  static const bool mapped = [] {
    std::ifstream map("/proc/self/uid_map");
    uint64_t inside = 0, outside = 0, count = 0;
    while (map >> inside >> outside >> count) {
      if (inside <= kOverflowUid && kOverflowUid - inside < count) return true;
    }
    return false;
  }();
  return mapped;
}

UniqueFd PidfdOf(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0) return UniqueFd(fd);
  if (errno != ENOPROTOOPT || pid <= 0) return UniqueFd();
  UniqueFd opened(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  // Older kernels: the number may have been reused. A peer that died has hung up by now.
  pollfd hangup{socket, POLLRDHUP, 0};
  if (poll(&hangup, 1, 0) != 0) return UniqueFd();
  return opened;
}

}  // namespace

Result<PeerCredentials> CredentialsOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return Unknown(std::string("the kernel gives no credentials of the peer: ") +
                   std::strerror(errno));
  }
  if (credentials.uid == static_cast<uid_t>(-1) ||
      (credentials.uid == kOverflowUid && !OverflowUidIsMapped())) {
    return Unknown("the peer's user is not mapped in this daemon's user namespace");
  }
  return PeerCredentials{credentials.uid, credentials.gid, static_cast<uint32_t>(credentials.pid)};
}

Result<PeerProcess> PeerProcessOf(int socket) {
  KVS_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(socket));
  UniqueFd pidfd = PidfdOf(socket, static_cast<pid_t>(peer.pid));
  if (!pidfd) {
    return Unknown("the peer process (pid " + std::to_string(peer.pid) +
                   ") is dead or cannot be watched from here; share the process namespace with "
                   "the daemon, or run Linux 6.5 or newer");
  }
  return PeerProcess{peer, std::move(pidfd)};
}

}  // namespace kvstrata
