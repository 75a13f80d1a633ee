// SPDX-License-Identifier: Apache-2.0
// SessionStream: the OpenSession call. The session begins with it and ends with it, whoever ends
// it: the client by cancelling or dying, the daemon by EndAll.
//
// Ownership: a stream owns itself until gRPC is done with it; SessionStreams keeps a share so that
// EndAll can reach it. Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_set>

#include "base/sync.h"
#include "kvstrata/v1/control.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class SessionStream;

// The open streams of one user.
class SessionStreams {
 public:
  // Ends every stream with `why`; streams opened later end at once.
  void EndAll(const Status& why) KVS_EXCLUDES(mu_);
  // Ends the stream of a session, if it is there.
  void End(uint64_t session) KVS_EXCLUDES(mu_);

 private:
  friend class SessionStream;
  // What EndAll ended streams with; OK while it was not called.
  Status Add(std::shared_ptr<SessionStream> stream) KVS_EXCLUDES(mu_);
  void Remove(const std::shared_ptr<SessionStream>& stream) KVS_EXCLUDES(mu_);

  Mutex mu_;
  std::unordered_set<std::shared_ptr<SessionStream>> streams_ KVS_GUARDED_BY(mu_);
  Status ended_ KVS_GUARDED_BY(mu_);
};

class SessionStream : public grpc::ServerWriteReactor<v1::OpenSessionResponse> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static SessionStream* Start(ServiceContext* context, SessionStreams* streams,
                              const v1::OpenSessionRequest& request);

  // Finishes the call; the first of several wins.
  void End(const Status& why);
  uint64_t session() const { return session_; }

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  SessionStream(ServiceContext* context, SessionStreams* streams)
      : context_(context), streams_(streams), under_way_(context->calls()) {}
  Status Open(const v1::OpenSessionRequest& request);
  // TRANSPORT_UNAVAILABLE, BACKEND_UNKNOWN.
  Result<std::unique_ptr<StepDevice>> StepsOf(const std::string& backend, uint32_t device) const;

  ServiceContext* const context_;
  SessionStreams* const streams_;
  std::shared_ptr<SessionStream> self_;  // until OnDone
  std::atomic<uint64_t> session_{0};     // 0: none was opened
  v1::OpenSessionResponse response_;
  std::atomic<bool> finished_{false};
  CallUnderWay under_way_;
};

}  // namespace kvstrata
