// SPDX-License-Identifier: Apache-2.0
// Connecting to a socket of the daemon's, the same for both transports.
//
// Thread-safety: functions without state. Errors: INVALID_ARGUMENT SOCKET_INVALID (a path that is
// too long, or no socket), PERMISSION_DENIED SOCKET_DENIED, DEADLINE_EXCEEDED DEADLINE (its backlog
// is full), UNAVAILABLE DAEMON_UNREACHABLE.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata::client {

// `path`: as the daemon was given it, which errors name; `suffix`: of the socket beside it. `type`:
// SOCK_STREAM or SOCK_SEQPACKET. Waits for `timeout` at most.
Result<UniqueFd> ConnectToDaemon(const std::string& path, std::string_view suffix, int type,
                                 std::chrono::microseconds timeout);

// Sets SO_SNDTIMEO or SO_RCVTIMEO.
void SetSocketTimeout(int fd, int option, std::chrono::microseconds timeout);

}  // namespace kvstrata::client
