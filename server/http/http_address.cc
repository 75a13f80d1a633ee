// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>

namespace kvstrata {
namespace {

constexpr std::string_view kUnixPrefix = "unix:";
constexpr std::string_view kIpv4Loopback = "127.0.0.1", kIpv6Loopback = "[::1]";
constexpr int kBacklog = 1024;  // or net.core.somaxconn

Status Refused(std::string_view text, std::string_view why) {
  return InvalidArgument("HTTP_LISTEN", "http.listen = '" + std::string(text) +
                                            "': " + std::string(why) +
                                            "; allowed: 127.0.0.1:PORT, [::1]:PORT, unix:/PATH, "
                                            "'' (nowhere)");
}

bool ParsePort(std::string_view text, uint16_t* port) {
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *port);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

Status CannotListen(std::string_view where, int error) {
  const std::string text = "http.listen = '" + std::string(where) + "': " + std::strerror(error);
  if (error == EADDRINUSE) {
    return {Code::kAlreadyExists, "HTTP_IN_USE",
            text + "; choose another port, or stop who listens there (ss -ltnp)"};
  }
  if (error == EACCES || error == EPERM) {
    return {Code::kPermissionDenied, "HTTP_PORT", text + "; choose a port above 1023"};
  }
  return Unavailable("HTTP_SYSTEM", text);
}

}  // namespace

bool IsHttpAddress(std::string_view text) {
  if (text.empty()) return true;
  if (text.starts_with(kUnixPrefix)) return text.substr(kUnixPrefix.size()).starts_with('/');
  const size_t colon = text.rfind(':');
  uint16_t port = 0;
  return colon != std::string_view::npos && colon != 0 && ParsePort(text.substr(colon + 1), &port);
}

Result<HttpAddress> ParseHttpAddress(std::string_view text) {
  HttpAddress address;
  if (text.empty()) return address;
  if (text.starts_with(kUnixPrefix)) {
    address.kind = HttpAddress::Kind::kUnix;
    address.path = text.substr(kUnixPrefix.size());
    if (address.path.starts_with('/')) return address;
    return Refused(text, "a Unix socket's path begins with /");
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return Refused(text, "it has no port");
  const std::string_view host = text.substr(0, colon), port = text.substr(colon + 1);
  if (host != kIpv4Loopback && host != kIpv6Loopback) {
    return Refused(text, "it is not loopback, and what is served there has no authentication");
  }
  address.kind = host == kIpv4Loopback ? HttpAddress::Kind::kIpv4 : HttpAddress::Kind::kIpv6;
  if (!ParsePort(port, &address.port)) {
    return Refused(text, "its port is none of 0 .. 65535");
  }
  return address;
}

Result<UniqueFd> ListenOnLoopback(const HttpAddress& address) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(address.port);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(address.port);
  v6.sin6_addr = in6addr_loopback;
  const bool is_v4 = address.kind == HttpAddress::Kind::kIpv4;
  const auto* const at =
      is_v4 ? reinterpret_cast<const sockaddr*>(&v4) : reinterpret_cast<const sockaddr*>(&v6);
  const std::string where =
      std::string(is_v4 ? kIpv4Loopback : kIpv6Loopback) + ":" + std::to_string(address.port);
  UniqueFd fd(socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // Connections that the last daemon closed keep its port for a minute else.
  const int on = 1;
  if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(fd.get(), at, is_v4 ? sizeof(v4) : sizeof(v6)) != 0 || listen(fd.get(), kBacklog) != 0) {
    return CannotListen(where, errno);
  }
  return fd;
}

std::string BoundAddress(int socket) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return "";
  if (bound.ss_family == AF_INET) {
    const auto port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
    return std::string(kIpv4Loopback) + ":" + std::to_string(port);
  }
  const auto port = ntohs(reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port);
  return std::string(kIpv6Loopback) + ":" + std::to_string(port);
}

}  // namespace kvstrata
