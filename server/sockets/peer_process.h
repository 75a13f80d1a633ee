// SPDX-License-Identifier: Apache-2.0
// The process at the other end of a Unix socket: from the kernel, never from a request.
//
// The pidfd becomes readable when the process is dead, which is what frees its memory; a peer
// without one is refused. Thread-safety: any thread. Cost: two or three system calls.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

struct PeerCredentials {
  uint32_t uid = 0, gid = 0, pid = 0;
};

struct PeerProcess {
  PeerCredentials credentials;
  UniqueFd pidfd;
};

// Errors of both: PEER_UNKNOWN (UNAUTHENTICATED: no credentials, a user that our namespace does not
// map, or a process that cannot be watched or is dead already).
Result<PeerProcess> PeerProcessOf(int socket);

// Credentials alone: for peers whose memory is not at stake.
Result<PeerCredentials> CredentialsOf(int socket);

}  // namespace kvstrata
