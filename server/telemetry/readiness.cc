// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/readiness.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/unique_fd.h"

namespace kvstrata {

void NotifyServiceManager(std::string_view state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::strlen(path);
  if (length < 2 || length >= sizeof(address.sun_path)) return;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract name
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  // Best effort: a service manager that is gone must not stop the daemon.
  (void)sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
               reinterpret_cast<const sockaddr*>(&address), size);
}

Status CheckReadyFd(int fd) {
  if (fd == -1 || (fd > 2 && fcntl(fd, F_GETFD) != -1)) return OkStatus();
  return InvalidArgument("READY_FD", "--ready-fd " + std::to_string(fd) +
                                         " is not an open descriptor above 2; pass one end of a "
                                         "pipe that the daemon inherits");
}

void SignalReadyFd(int fd) {
  if (fd < 0) return;
  const UniqueFd owned(fd);
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = write(fd, &byte, 1);  // best effort
}

}  // namespace kvstrata
