// SPDX-License-Identifier: Apache-2.0
// ServiceContext: what the services of one user share: the store, who the user is, its sessions,
// and the way from a call to a task and back to a gRPC status.
//
// One per user (grpc_server.h says why), made before its gRPC server and outliving it.
// Ownership: borrows the options' parts; shares sessions with the streams that hold them.
// Threads: all methods from any thread; one short lock. Cost: a call is one hop to a work thread.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/sync.h"
#include "proto/status_map.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/rpc/steps/remote_session.h"
#include "server/rpc/steps/work_queue.h"
#include "server/telemetry/spans.h"

namespace kvstrata {

// What gRPC hands a call to, and what a call answers through.
using CallContext = grpc::CallbackServerContext;
using UnaryReactor = grpc::ServerUnaryReactor;
template <typename Response>
using WriteReactor = grpc::ServerWriteReactor<Response>;

// CallsUnderWay: how many calls have begun and are not over, so that a daemon that stops can let
// them end. A call is over when gRPC is done with its reactor: its answer is with the kernel.
//
// CallUnderWay: one of them; a member of the call's reactor. UnaryCall: a reactor that counts, for
// calls of one answer.
//
// Thread-safety: all of it, from any thread. Ownership: calls borrow the count, which outlives
// them; a UnaryCall owns itself until gRPC calls OnDone. Cost: a short lock at each end of a call.
class CallsUnderWay {
 public:
  // `all`: counts these calls too, with those of others; it outlives this.
  explicit CallsUnderWay(CallsUnderWay* all = nullptr) : all_(all) {}
  void Begin() KVS_EXCLUDES(mu_);
  void End() KVS_EXCLUDES(mu_);
  size_t calls() const KVS_EXCLUDES(mu_);
  // Blocks until there is none; false: `deadline` came first.
  bool AwaitNone(std::chrono::steady_clock::time_point deadline) KVS_EXCLUDES(mu_);

 private:
  CallsUnderWay* const all_;
  mutable Mutex mu_;
  std::condition_variable none_;
  size_t calls_ KVS_GUARDED_BY(mu_) = 0;
};

class CallUnderWay {
 public:
  explicit CallUnderWay(CallsUnderWay* calls) : calls_(calls) { calls_->Begin(); }
  ~CallUnderWay() { End(); }
  CallUnderWay(const CallUnderWay&) = delete;
  CallUnderWay& operator=(const CallUnderWay&) = delete;

  // It is over before this object is. One thread.
  void End() {
    if (calls_ != nullptr) calls_->End();
    calls_ = nullptr;
  }

 private:
  CallsUnderWay* calls_;
};

class UnaryCall final : public UnaryReactor {
 public:
  explicit UnaryCall(CallsUnderWay* calls) : under_way_(calls) {}
  void OnDone() override { delete this; }

 private:
  CallUnderWay under_way_;
};

class ServiceContext {
 public:
  // `admin`: root, or the daemon's own user.
  ServiceContext(const GrpcOptions& options, PeerIdentity user, bool admin, WorkQueue* queue,
                 CallsUnderWay* calls)
      : options_(options), user_(std::move(user)), admin_(admin), queue_(queue), calls_(calls) {}

  const GrpcOptions& options() const { return options_; }
  Store& store() const { return *options_.store; }
  const PeerIdentity& user() const { return user_; }
  WorkQueue* queue() const { return queue_; }
  // The calls under way that this user's streams count in.
  CallsUnderWay* calls() const { return calls_; }

  // UNAVAILABLE DAEMON_STOPPING.
  static Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }
  // From now on calls that need a session or the queue are answered with it.
  void EndServing() { stopping_ = true; }
  bool stopping() const { return stopping_; }

  // OK, or PERMISSION_DENIED ADMIN_ONLY.
  Status CheckAdmin() const;
  // Both: NOT_FOUND TIER_UNKNOWN.
  static Status NoDisk();
  Status NoRemote() const;

  void AddSession(std::shared_ptr<RemoteSession> session) KVS_EXCLUDES(mu_);
  bool HasSessions() const KVS_EXCLUDES(mu_);
  // The session, for whoever ends it; null when somebody else does already.
  std::shared_ptr<RemoteSession> TakeSession(uint64_t session) KVS_EXCLUDES(mu_);
  // DAEMON_STOPPING; SESSION_UNKNOWN (NOT_FOUND) also for a session of another user or of the
  // linked transport.
  Result<std::shared_ptr<RemoteSession>> FindSession(uint64_t session) const KVS_EXCLUDES(mu_);

  // Answers at once.
  static UnaryReactor* Answer(CallContext* call, grpc::Status status) {
    UnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(std::move(status));
    return reactor;
  }
  static UnaryReactor* Answer(CallContext* call, const Status& status) {
    return Answer(call, ToGrpc(status));
  }

  // A reactor that somebody will finish later.
  UnaryReactor* NewCall() const { return new UnaryCall(calls_); }

  // fn() as a gRPC status; what it threw for want of memory is the call's answer and nobody else's
  // trouble.
  template <typename Fn>
  static grpc::Status Outcome(Fn&& fn) {
    try {
      return AsGrpc(fn());
    } catch (const std::bad_alloc&) {
      return ToGrpc(NoMemory());
    } catch (const std::length_error&) {
      return ToGrpc(NoMemory());
    }
  }

  // Calls fn(reactor, session) on the strand of the request's session; fn sees to it that the
  // reactor is finished. What fn captures of the call's messages stays until then.
  template <typename Request, typename Fn>
  UnaryReactor* OnStrand(CallContext* call, const Request* request, Fn fn) {
    Result<std::shared_ptr<RemoteSession>> found = FindSession(request->session());
    if (!found.ok()) return Answer(call, found.status());
    UnaryReactor* reactor = NewCall();
    const grpc::Status posted = Outcome([&] {
      return (*found)->Post([reactor, s = *found, fn = std::move(fn)] { fn(reactor, s); });
    });
    if (!posted.ok()) reactor->Finish(posted);
    return reactor;
  }

  // Answers with what fn(RemoteSession&) returns (a Status or a grpc::Status), run on the session's
  // strand. A call that was cancelled while it waited does not run.
  template <typename Request, typename Fn>
  UnaryReactor* InSession(CallContext* call, const Request* request, Fn fn) {
    return OnStrand(call, request, [call, fn = std::move(fn)](UnaryReactor* reactor, auto& s) {
      reactor->Finish(call->IsCancelled() ? grpc::Status::CANCELLED
                                          : Outcome([&] { return fn(*s); }));
    });
  }

  // Finishes a call that OnStrand began as InSession does.
  template <typename Fn>
  static void FinishOnStrand(CallContext* call, UnaryReactor* reactor,
                             const std::shared_ptr<RemoteSession>& s, Fn fn) {
    if (call->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
    const Status posted = s->Post(
        [reactor, s, fn = std::move(fn)] { reactor->Finish(Outcome([&] { return fn(*s); })); });
    if (!posted.ok()) reactor->Finish(ToGrpc(posted));
  }

  // As InSession, without a session: for what takes long.
  template <typename Fn>
  UnaryReactor* InQueue(CallContext* call, Fn fn) {
    if (stopping_) return Answer(call, Stopping());
    UnaryReactor* reactor = NewCall();
    const grpc::Status posted = Outcome([&] {
      queue_->Post([reactor, fn = std::move(fn)] { reactor->Finish(Outcome(fn)); });
      return OkStatus();
    });
    if (!posted.ok()) reactor->Finish(posted);
    return reactor;
  }

  // Answer and InQueue for what fn() returns to an operator; others get ADMIN_ONLY.
  template <typename Fn>
  UnaryReactor* AsAdmin(CallContext* call, Fn&& fn) const {
    const Status admin = CheckAdmin();
    return Answer(call, admin.ok() ? fn() : admin);
  }
  template <typename Fn>
  UnaryReactor* AsAdminInQueue(CallContext* call, Fn fn) {
    return InQueue(call, [this, fn = std::move(fn)] {
      const Status admin = CheckAdmin();
      return admin.ok() ? fn() : admin;
    });
  }

 private:
  static grpc::Status AsGrpc(const Status& status) { return ToGrpc(status); }
  static grpc::Status AsGrpc(grpc::Status status) { return status; }
  static Status NoMemory();

  const GrpcOptions& options_;
  const PeerIdentity user_;
  const bool admin_;
  WorkQueue* const queue_;
  CallsUnderWay* const calls_;
  std::atomic<bool> stopping_{false};

  mutable Mutex mu_;
  std::unordered_map<uint64_t, std::shared_ptr<RemoteSession>> sessions_ KVS_GUARDED_BY(mu_);
};

// The span of a call whose caller gave a traceparent (server/telemetry/spans.h); null: none did.
inline std::shared_ptr<RequestSpan> TracedCall(const grpc::CallbackServerContext& call,
                                               std::string_view name) {
  if (!Spans().enabled()) return nullptr;
  const auto found = call.client_metadata().find("traceparent");
  if (found == call.client_metadata().end()) return nullptr;
  return RequestSpan::Begin(name, {found->second.data(), found->second.size()});
}

}  // namespace kvstrata
