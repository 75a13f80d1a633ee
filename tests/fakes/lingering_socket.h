// SPDX-License-Identifier: Apache-2.0
// A descriptor whose last close blocks: a TCP socket with SO_LINGER whose peer does not read. Not
// thread-safe.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <vector>

#include "base/unique_fd.h"

namespace kvstrata::testing {

class LingeringSocket {
 public:
  // Closing blocks for `seconds`, unless a signal or the peer's end comes first.
  explicit LingeringSocket(int seconds) {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    const int small = 4096;
    Check(setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0 &&
          bind(listener.get(), at, size) == 0 && listen(listener.get(), 1) == 0 &&
          getsockname(listener.get(), at, &size) == 0);
    fd_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Check(connect(fd_.get(), at, size) == 0);
    peer_.Reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Check(static_cast<bool>(peer_) && fcntl(fd_.get(), F_SETFL, O_NONBLOCK) == 0);
    const std::vector<char> bytes(1 << 16);
    while (send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
    const linger wait{1, seconds};
    Check(setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait)) == 0);
  }

  int fd() const { return fd_.get(); }
  // Ours, for somebody else to close.
  UniqueFd Take() { return std::move(fd_); }
  // Another process or thread has it: our own copy closes without a wait then.
  void Forget() { fd_.Reset(); }

 private:
  static void Check(bool ok) {
    if (!ok) std::abort();
  }
  UniqueFd fd_, peer_;
};

}  // namespace kvstrata::testing
