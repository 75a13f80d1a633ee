// SPDX-License-Identifier: Apache-2.0
#include "client/daemon_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace kvstrata::client {
namespace {

Status Unreachable(const std::string& path, int error) {
  const std::string at = "socket '" + path + "': " + std::strerror(error);
  if (error == EACCES || error == EPERM) {
    return {Code::kPermissionDenied, "SOCKET_DENIED",
            at + "; the daemon's user or group must admit this user (mode 0660)"};
  }
  if (error == EAGAIN || error == ETIMEDOUT) {
    return {Code::kDeadlineExceeded, "DEADLINE", at + "; the daemon does not accept connections"};
  }
  return Unavailable("DAEMON_UNREACHABLE",
                     at + "; start it with `kvstratad --socket " + path + "`");
}

Status CheckPath(const std::string& path) {
  struct stat st {};
  if (stat(path.c_str(), &st) == 0 && !S_ISSOCK(st.st_mode)) {
    return InvalidArgument("SOCKET_INVALID",
                           "socket '" + path + "' is " +
                               (S_ISDIR(st.st_mode) ? "a directory" : "not a socket") +
                               "; name the socket that `kvstratad --socket` was given");
  }
  return OkStatus();
}

}  // namespace

void SetSocketTimeout(int fd, int option, std::chrono::microseconds timeout) {
  const timeval t{static_cast<time_t>(timeout.count() / 1000000),
                  static_cast<suseconds_t>(timeout.count() % 1000000)};
  setsockopt(fd, SOL_SOCKET, option, &t, sizeof(t));
}

Result<UniqueFd> ConnectToDaemon(const std::string& path, std::string_view suffix, int type,
                                 std::chrono::microseconds timeout) {
  KVS_RETURN_IF_ERROR(CheckPath(path));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string full = path + std::string(suffix);
  if (full.size() >= sizeof(address.sun_path)) {
    return InvalidArgument(
        "SOCKET_INVALID",
        "socket '" + path + "' has " + std::to_string(path.size()) + " bytes; at most " +
            std::to_string(sizeof(address.sun_path) - 1 - suffix.size()) + " are allowed");
  }
  std::memcpy(address.sun_path, full.data(), full.size());
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!fd) return Unreachable(path, errno);
  SetSocketTimeout(fd.get(), SO_SNDTIMEO, timeout);  // a full backlog makes connect wait
  int rc;
  do {
    rc = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) return Unreachable(path, errno);
  return fd;
}

}  // namespace kvstrata::client
