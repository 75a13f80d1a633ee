// SPDX-License-Identifier: Apache-2.0
// GrpcServer: the daemon's gRPC services (control, compute, admin, cluster; health, reflection)
// behind a listening Unix socket that the caller owns.
//
// Who calls: gRPC tells no handler which connection it runs on, so a connection is handed to a
// server of its user. Every user (SO_PEERCRED, read before a byte is parsed) has a gRPC server of
// its own in this process, made at the first connection; services know their user because they
// belong to it. Sessions and sequences of another user do not exist for them, and Admin answers
// root and the daemon's own user only. Process ids are not told apart: a remote session's pid is 0.
//
// Every connection has a place of its user's (Limit::kConnections of the store's user_limits) and
// is known until it ends by GrpcConnections; who is refused hears why (refused_connections.h).
// Descriptors that a peer sends along are for the listener to refuse (unix_listener.h): gRPC would
// close them on its own threads, which the peer can make last.
//
// At most kMaxUsers users have a server: for another one, the server that has been idle
// longest, without connections, sessions and calls, is taken down; never an operator's.
//
// Reflection is served to root and the daemon's own user.
//
// grpc.health.v1 answers everybody alike, for the names of admin_messages.h; a change is seen
// within a second.
//
// Sessions live as long as their OpenSession stream; when it ends, steps and sequences of the
// session are dropped and Sessions::EndSession(kDied) is called.
//
// Threads: one that accepts ("kvs-grpc-accept"), gRPC's own, and `workers` that run what takes
// longer than the store's lock. Calls of one session run one after another, in the order of their
// arrival. Ownership: everything in GrpcOptions is borrowed and outlives Shutdown. Limits: 64 MiB a
// request (RESOURCE_EXHAUSTED), 128 calls at a time per connection, 256 waiting calls per session,
// kMaxUsers users connected. The last descriptors are kept for operators (base/descriptors.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "base/status.h"
#include "server/rpc/calls/grpc_options.h"

namespace kvstrata {

class GrpcServer {
 public:
  static constexpr size_t kMaxUsers = 64;
  static constexpr int kMaxMessageBytes = 64 << 20;

  // Serves from the moment it returns. INTERNAL GRPC_START when gRPC cannot.
  static Result<std::unique_ptr<GrpcServer>> Start(const GrpcOptions& options);
  // Shutdown(0) if it was not called.
  ~GrpcServer();

  // Takes no connection from now on and answers new calls with UNAVAILABLE DAEMON_STOPPING, ends
  // the session streams with the same, and lets the calls under way end for `grace` at most: what
  // lasts longer goes on until Shutdown. Idempotent but for the wait; one thread.
  void EndServing(std::chrono::milliseconds grace);
  // EndServing; then cuts every connection, cancels what is left, and returns when gRPC is gone.
  // Mostly at once, but gRPC gives no bound: settle first what others rely on. Idempotent; one
  // thread.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
