// SPDX-License-Identifier: Apache-2.0
// NodeServer: answers other nodes of the cluster at this node's announced address, and nobody else:
// kvstrata.v1.Nodes, which looks up pages by their keys. No tokens come here, and nothing of the
// other services is there.
//
// Who calls has shown a certificate (NodeCredentials), where the address is not on loopback, and
// must have the cluster's secret: each call has a MAC and the caller's time, and the answer one of
// its own. Bounds: 8 MiB a call, kMostCalls at a time of a connection, 64 MiB of all messages, two
// seconds for a handshake.
// Threads: gRPC's. Ownership: borrows the store.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "server/nodes/node_credentials.h"
#include "server/store/store.h"
#include "server/tier/remote/node_announcement.h"

namespace kvstrata {

class NodeServer {
 public:
  static constexpr int kMostCalls = 16;
  static constexpr int kMaxCallBytes = 8 << 20;

  // UNAVAILABLE REMOTE_ANNOUNCE: it cannot listen there.
  static Result<std::unique_ptr<NodeServer>> Start(const std::string& address,
                                                   const NodeCredentials& credentials,
                                                   const remote::NodeKeys& keys, Store* store);
  // Cuts every connection.
  ~NodeServer();

 private:
  class Service;
  struct Parts;
  explicit NodeServer(std::unique_ptr<Parts> parts);
  const std::unique_ptr<Parts> parts_;
};

// Whether a node can listen where it announces itself (remote.announce), with the system's own
// words where it cannot: gRPC tells only that it could not.
//
// Binds a socket to `address`, "HOST:PORT", as a server would, and closes it. ALREADY_EXISTS
// REMOTE_ANNOUNCE_IN_USE: somebody listens there; INVALID_ARGUMENT REMOTE_ANNOUNCE: it is no
// address of this machine, or not for this user. Any thread. Cost: some system calls; of a host
// that is a name its resolution, too.
Status CheckCanListen(const std::string& address);

}  // namespace kvstrata
