// SPDX-License-Identifier: Apache-2.0
// Where http.listen listens: loopback or a Unix socket, and nowhere else. What is served has no
// authentication and tells of every user, so it must not be reached from another machine; who wants
// that puts a proxy of theirs in front.
//
// Values; any thread. Errors: INVALID_ARGUMENT HTTP_LISTEN, with what is allowed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

struct HttpAddress {
  enum class Kind : uint8_t { kNone, kIpv4, kIpv6, kUnix };

  Kind kind = Kind::kNone;
  uint16_t port = 0;  // 0: any that is free
  std::string path;   // path of kUnix
};

// Whether it is an address at all, of whatever host: HOST:PORT, unix:/PATH, or "".
bool IsHttpAddress(std::string_view text);

// "127.0.0.1:9465", "[::1]:9465", "unix:/run/kvstrata/http.sock"; "": nowhere.
Result<HttpAddress> ParseHttpAddress(std::string_view text);

// A listening socket of a loopback address, non-blocking. ALREADY_EXISTS HTTP_IN_USE;
// PERMISSION_DENIED HTTP_PORT; UNAVAILABLE HTTP_SYSTEM. REQUIRES: kIpv4 or kIpv6.
Result<UniqueFd> ListenOnLoopback(const HttpAddress& address);

// "127.0.0.1:9465", as the socket is bound.
std::string BoundAddress(int socket);

}  // namespace kvstrata
