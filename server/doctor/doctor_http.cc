// SPDX-License-Identifier: Apache-2.0
// Whether what is to be served over HTTP can be.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "base/unique_fd.h"
#include "server/doctor/doctor_checks.h"

namespace kvstrata::doctor {
namespace {

constexpr std::chrono::milliseconds kPatience{1000};

// Connected to the address; -1: nobody listens.
UniqueFd Connect(const HttpAddress& address) {
  sockaddr_storage to{};
  socklen_t size = sizeof(sockaddr_un);
  if (address.kind == HttpAddress::Kind::kUnix) {
    auto* const un = reinterpret_cast<sockaddr_un*>(&to);
    if (address.path.size() >= sizeof(un->sun_path)) return UniqueFd();
    un->sun_family = AF_UNIX;
    std::memcpy(un->sun_path, address.path.data(), address.path.size());
  } else if (address.kind == HttpAddress::Kind::kIpv4) {
    auto* const in = reinterpret_cast<sockaddr_in*>(&to);
    *in = {AF_INET, htons(address.port), {htonl(INADDR_LOOPBACK)}, {}};
    size = sizeof(*in);
  } else {
    auto* const in6 = reinterpret_cast<sockaddr_in6*>(&to);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(address.port);
    in6->sin6_addr = in6addr_loopback;
    size = sizeof(*in6);
  }
  UniqueFd fd(socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), size) != 0) {
    return UniqueFd();
  }
  return fd;
}

// Whether who listens there is a daemon of ours.
bool IsADaemon(const UniqueFd& fd) {
  constexpr std::string_view kRequest = "GET /metrics HTTP/1.0\r\n\r\n";
  (void)send(fd.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL);
  std::string text;
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (text.size() < 4096 && text.find("kvstrata_build_info") == std::string::npos) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    pollfd wait{fd.get(), POLLIN, 0};
    std::array<char, 1024> part;
    if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) != 1) return false;
    const ssize_t n = recv(fd.get(), part.data(), part.size(), 0);
    if (n <= 0) return false;
    text.append(part.data(), static_cast<size_t>(n));
  }
  return text.find("kvstrata_build_info") != std::string::npos;
}

// It is well if that daemon is the one at the socket: a start is then one of the same.
Finding ServedByADaemon(const Config& config) {
  bool denied = false;
  const auto listen = DaemonsKey(config.socket, "http.listen", &denied);
  const Result<HttpAddress> its = ParseHttpAddress(listen.value_or(""));
  const HttpAddress& own = config.http;
  if (its.ok() && its->kind == own.kind && its->port == own.port && its->path == own.path) {
    return Ok("http", config.http_listen + " is served by the daemon at '" + config.socket + "'");
  }
  if (denied) {
    return Ok("http", config.http_listen + " is served by a daemon; whether it is the one at '" +
                          config.socket + "' that tells its own user and root alone");
  }
  return Fail("http",
              Status(Code::kAlreadyExists, "HTTP_IN_USE",
                     "http.listen = '" + config.http_listen + "': another daemon than one at '" +
                         config.socket + "' listens there"),
              "choose another port, or stop that daemon: ss -ltnxp");
}

Finding CheckHttpFolder(const HttpAddress& address) {
  const std::string folder = std::filesystem::path(address.path).parent_path();
  std::error_code error;
  if (std::filesystem::is_directory(folder, error)) return Ok("http", "unix:" + address.path);
  return Fail("http",
              NotFound("SOCKET_DIRECTORY", "http.listen: the folder '" + folder + "' is not there"),
              "mkdir -p " + folder + ", owned by the daemon's user, mode 0755");
}

}  // namespace

Finding CheckHttp(const Config& config) {
  const HttpAddress& address = config.http;
  if (address.kind == HttpAddress::Kind::kNone) {
    return Ok("http", "nothing is served (http.listen = \"\")");
  }
  if (const UniqueFd served = Connect(address); served) {
    if (IsADaemon(served)) return ServedByADaemon(config);
    return Fail("http",
                Status(Code::kAlreadyExists, "HTTP_IN_USE",
                       "http.listen = '" + config.http_listen + "': another program listens there"),
                "choose another port, or stop who listens there: ss -ltnxp");
  }
  if (address.kind == HttpAddress::Kind::kUnix) return CheckHttpFolder(address);
  const Result<UniqueFd> port = ListenOnLoopback(address);
  if (!port.ok()) return Fail("http", port.status(), "choose another port for http.listen");
  return Ok("http", config.http_listen + " is free");
}

}  // namespace kvstrata::doctor
