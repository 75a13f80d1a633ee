// SPDX-License-Identifier: Apache-2.0
// Whether a node can listen where it announces itself (remote.announce), with the system's own
// words where it cannot: gRPC tells only that it could not.
#ifndef KVSTRATA_SERVER_NODES_NODE_ADDRESS_H_
#define KVSTRATA_SERVER_NODES_NODE_ADDRESS_H_

#include <string>

#include "base/status.h"

namespace kvstrata {

// Binds a socket to `address`, "HOST:PORT", as a server would, and closes it. ALREADY_EXISTS
// REMOTE_ANNOUNCE_IN_USE: somebody listens there; INVALID_ARGUMENT REMOTE_ANNOUNCE: it is no
// address of this machine, or not for this user. Any thread. Cost: some system calls; of a host
// that is a name its resolution, too.
Status CheckCanListen(const std::string& address);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_NODES_NODE_ADDRESS_H_
