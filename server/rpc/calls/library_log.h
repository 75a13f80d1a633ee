// SPDX-License-Identifier: Apache-2.0
// What gRPC and protobuf write to stderr on their own, as events of the daemon's log ("grpc",
// "protobuf"): in its format, at most five lines a second of each, since a peer can provoke them,
// and without what a peer sent.
#ifndef KVSTRATA_SERVER_RPC_CALLS_LIBRARY_LOG_H_
#define KVSTRATA_SERVER_RPC_CALLS_LIBRARY_LOG_H_

namespace kvstrata {

// For the whole process, and for good. Any thread; idempotent.
void TakeOverLibraryLogs();

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_LIBRARY_LOG_H_
