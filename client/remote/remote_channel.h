// SPDX-License-Identifier: Apache-2.0
// RemoteChannel: one gRPC connection to the daemon and the stream that is its session's lease. For
// remote_session.cc alone.
//
// It dials the Unix socket itself and hands the descriptor to gRPC: errors of the socket have
// names, no proxy or resolver is asked, and a daemon that restarts is another daemon: nothing
// reconnects. Threads: any; one of its own waits for the end of the stream. Cost: a call blocks
// until its answer or the timeout.
#pragma once

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/status.h"
#include "client/session.h"
#include "kvstrata/v1/compute.grpc.pb.h"
#include "kvstrata/v1/control.grpc.pb.h"
#include "proto/status_map.h"

namespace kvstrata::client {

class RemoteChannel {
 public:
  // Dials and opens a session. SOCKET_INVALID, SOCKET_DENIED, DAEMON_UNREACHABLE, DEADLINE, or what
  // the daemon refused with.
  static Result<std::unique_ptr<RemoteChannel>> Open(const AttachOptions& options,
                                                     const std::string& backend);
  // Closes the session; waits for the daemon's answer at most the timeout, and a second.
  ~RemoteChannel();
  // In a child of fork(): closes the socket, so that the child does not keep the lease alive.
  // Nothing else may be done afterwards, not even destruction.
  void AbandonAfterFork();

  uint64_t session() const { return session_; }

  // One unary call, whose request gets this session's number. Errors as Call has.
  template <typename Stub, typename Request, typename Response>
  Result<Response> Ask(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                    Response*),
                       Request& request) {
    if constexpr (requires { request.set_session(0); }) request.set_session(session_);
    Response response;
    KVS_RETURN_IF_ERROR(Call(method, request, &response));
    return response;
  }
  // As Ask, for what is asked about a sequence and says nothing more.
  template <typename Stub, typename Request, typename Response>
  Result<Response> AskOf(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
                         uint64_t sequence) {
    Request request;
    request.set_sequence(sequence);
    return Ask(method, request);
  }
  // One unary call. `raw` (may be null) is the status as gRPC has it. DAEMON_GONE once the session
  // has ended.
  template <typename Stub, typename Request, typename Response>
  Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& request, Response* response, grpc::Status* raw = nullptr) {
    KVS_RETURN_IF_ERROR(Alive());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout_);
    const grpc::Status status = (StubOf<Stub>()->*method)(&context, request, response);
    if (raw != nullptr) *raw = status;
    return Translate(status);
  }

 private:
  class Lease;  // the OpenSession stream

  RemoteChannel() = default;
  Status Alive() const;
  // The status, with both versions where the daemon does not know the call.
  Status Translate(const grpc::Status& status) const;
  template <typename Stub>
  Stub* StubOf() {
    if constexpr (std::is_same_v<Stub, v1::Control::Stub>) {
      return control_.get();
    } else {
      return compute_.get();
    }
  }

  std::chrono::milliseconds timeout_{0};
  int socket_ = -1;  // gRPC's
  ino_t socket_inode_ = 0;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Compute::Stub> compute_;
  std::unique_ptr<Lease> lease_;
  uint64_t session_ = 0;
};

}  // namespace kvstrata::client
