// SPDX-License-Identifier: Apache-2.0
// Who is at the other end of a Unix socket: from the kernel, never from a request.
//
// The pidfd becomes readable when the process is dead, which is what frees its memory; a peer
// without one is refused. Thread-safety: any thread. Cost: three system calls.
#pragma once

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/store/store.h"

namespace kvstrata {

struct Peer {
  PeerIdentity identity;
  UniqueFd pidfd;
};

// Errors: PEER_UNKNOWN (UNAUTHENTICATED: no credentials, a user that our namespace does not map, or
// a process that cannot be watched or is dead already).
Result<Peer> PeerOf(int socket);

// Credentials alone: for peers whose memory is not at stake.
Result<PeerIdentity> IdentityOf(int socket);

}  // namespace kvstrata
