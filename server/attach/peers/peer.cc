// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/peer.h"

#include <string>
#include <utility>

#include "server/sockets/peer_process.h"

namespace kvstrata {
namespace {

PeerIdentity IdentityFrom(const PeerCredentials& credentials) {
  PeerIdentity identity;
  identity.uid = credentials.uid;
  identity.gid = credentials.gid;
  identity.pid = credentials.pid;
  identity.tenant = "uid:" + std::to_string(credentials.uid);
  return identity;
}

}  // namespace

Result<PeerIdentity> IdentityOf(int socket) {
  KVS_ASSIGN_OR_RETURN(const PeerCredentials credentials, CredentialsOf(socket));
  return IdentityFrom(credentials);
}

Result<Peer> PeerOf(int socket) {
  KVS_ASSIGN_OR_RETURN(PeerProcess process, PeerProcessOf(socket));
  return Peer{IdentityFrom(process.credentials), std::move(process.pidfd)};
}

}  // namespace kvstrata
