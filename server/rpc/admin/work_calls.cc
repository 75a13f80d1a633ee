// SPDX-License-Identifier: Apache-2.0
// Calls of both services that ask something of the workers (server/store/codecs/work_requests.h).
#include <chrono>
#include <memory>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_messages.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/shared_stream.h"
#include "server/rpc/engine/compute_service.h"
#include "server/store/codecs/work_requests.h"

namespace kvstrata {
namespace {

constexpr std::chrono::milliseconds kWorkInterval{250};

// RecompressStream: the RecompressSequence call. Asks for the sequence's recompression and tells
// how far it is until that is over; the call's end leaves the work going on.
//
// The store holds a share until it has answered. Cost: a look at the sequence and a message, at
// most four a second.
class RecompressStream final
    : public ProgressStream<RecompressStream, v1::RecompressSequenceRequest,
                            v1::RecompressSequenceResponse> {
 public:
  RecompressStream(ServiceContext* context, const v1::RecompressSequenceRequest& request)
      : ProgressStream(context), sequence_(request.sequence()) {}
  Status Begin(const v1::RecompressSequenceRequest&) {
    WorkRequests& requests = context_->store().requests();
    KVS_ASSIGN_OR_RETURN(const WorkProgress before, requests.Progress(0, sequence_));
    released_before_ = before.released_bytes;
    KVS_RETURN_IF_ERROR(requests.Recompress(
        0, sequence_, [self = shared_from_this()](const Status& why) { self->End(why); }));
    Tell();
    return OkStatus();
  }

  // Nobody listens any more: the work goes on.
  void OnCancel() override {
    End({Code::kAborted, "CALL_CANCELLED", "the caller went away; the work goes on"});
  }

 private:
  // Tells how far it is, now and again.
  void Tell() KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (ended()) return;
    TellLocked();
    TellAt(std::chrono::system_clock::now() + kWorkInterval, &RecompressStream::Tell, &next_);
  }
  // Unless the sequence is gone.
  void FillIn() override KVS_REQUIRES(mu_) {
    const Result<WorkProgress> progress = context_->store().requests().Progress(0, sequence_);
    if (ended()) response_.clear_work();
    if (!progress.ok()) return;
    response_.Clear();
    if (!progress->done && !ended()) Write(progress->work, response_.mutable_work());
    response_.set_extents(progress->extents);
    response_.set_released_bytes(progress->released_bytes - released_before_);
  }

  const uint64_t sequence_;
  uint64_t released_before_ = 0;
  std::unique_ptr<grpc::Alarm> next_ KVS_GUARDED_BY(mu_);
};

// Response: a BuildResponse or a BuildSequenceResponse.
template <typename Response>
void Write(const BuildResult& built, Response* out) {
  KVS_COPY_FIELDS(out, built, plan, indexed_tokens, built_blocks, extents, done);
}

// What the workers made is the step state's now; the rows behind it, and buckets, it makes itself.
Status TakeBuilt(RemoteSession& s, uint64_t sequence, v1::BuildResponse* response) {
  KVS_ASSIGN_OR_RETURN(const RemoteSequence* found, s.Find(sequence));
  if (response->plan() != FormatPlan(found->state->plan())) return OkStatus();
  const Status settled = s.Settle(sequence);
  if (settled.reason() == "SEQUENCE_BUSY") return OkStatus();  // the step under way takes it next
  KVS_RETURN_IF_ERROR(settled);
  response->set_indexed_tokens(static_cast<uint32_t>(found->state->indexed_tokens()));
  return OkStatus();
}

}  // namespace

UnaryReactor* ComputeService::Build(CallContext* call, const v1::BuildRequest* request,
                                    v1::BuildResponse* response) {
  const auto build = [this, call, request, response](UnaryReactor* reactor, const auto& s) {
    if (const Status idle = s->CheckIdle(request->sequence()); !idle.ok()) {
      return reactor->Finish(ToGrpc(idle));
    }
    const auto answer = [call, reactor, request, response, s](const Result<BuildResult>& built) {
      if (!built.ok()) return reactor->Finish(ToGrpc(built.status()));
      Write(*built, response);
      if (!built->done) return reactor->Finish(grpc::Status::OK);
      ServiceContext::FinishOnStrand(call, reactor, s, [request, response](RemoteSession& session) {
        return TakeBuilt(session, request->sequence(), response);
      });
    };
    const bool waits = !request->no_wait();
    const Result<BuildResult> now = context_->store().builds().Build(
        {s->id(), request->sequence(), request->plan()}, waits ? BuildDone(answer) : BuildDone());
    if (!now.ok() || now->done || !waits) answer(now);
  };
  return context_->OnStrand(call, request, build);
}

UnaryReactor* ComputeService::Recompress(CallContext* call, const v1::RecompressRequest* request,
                                         v1::RecompressResponse* response) {
  const auto recompress = [this, call, request, response](UnaryReactor* reactor, const auto& s) {
    WorkRequests& requests = context_->store().requests();
    const uint64_t sequence = request->sequence();
    const bool waits = !request->no_wait();
    Status asked = s->CheckIdle(sequence);
    Result<WorkProgress> before = asked.ok() ? requests.Progress(s->id(), sequence) : asked;
    if (!before.ok()) return reactor->Finish(ToGrpc(before.status()));
    const auto answer = [&requests, call, reactor, response, s, sequence, waits,
                         released = before->released_bytes](const Status& settled) {
      if (!settled.ok()) return reactor->Finish(ToGrpc(settled));
      const Result<WorkProgress> after = requests.Progress(s->id(), sequence);
      if (!after.ok()) return reactor->Finish(ToGrpc(after.status()));
      response->set_extents(after->extents);
      response->set_released_bytes(after->released_bytes - released);
      response->set_done(after->done);
      if (!waits) return reactor->Finish(grpc::Status::OK);
      ServiceContext::FinishOnStrand(call, reactor, s, [sequence](RemoteSession& session) {
        return session.Settle(sequence);
      });
    };
    asked = requests.Recompress(s->id(), sequence, waits ? SettleDone(answer) : SettleDone());
    if (!asked.ok() || !waits) answer(asked);
  };
  return context_->OnStrand(call, request, recompress);
}

UnaryReactor* ComputeService::StopWork(CallContext* call, const v1::StopWorkRequest* request,
                                       v1::StopWorkResponse* response) {
  const Result<std::shared_ptr<RemoteSession>> found = context_->FindSession(request->session());
  if (!found.ok()) return ServiceContext::Answer(call, found.status());
  const Result<bool> ran = context_->store().requests().Cancel((*found)->id(), request->sequence());
  if (ran.ok()) response->set_was_running(*ran);
  return ServiceContext::Answer(call, ran.status());
}

UnaryReactor* AdminService::BuildSequence(CallContext* call,
                                          const v1::BuildSequenceRequest* request,
                                          v1::BuildSequenceResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  UnaryReactor* reactor = context_->NewCall();
  // It looks at every page of the sequence.
  context_->queue()->Post([this, reactor, request, response] {
    const auto answer = [reactor, response](const Result<BuildResult>& built) {
      if (built.ok()) Write(*built, response);
      reactor->Finish(ToGrpc(built.status()));
    };
    const Result<BuildResult> now =
        context_->store().builds().Build({0, request->sequence(), request->plan()}, answer);
    if (!now.ok() || now->done) answer(now);
  });
  return reactor;
}

WriteReactor<v1::RecompressSequenceResponse>* AdminService::RecompressSequence(
    CallContext*, const v1::RecompressSequenceRequest* request) {
  return RecompressStream::Start(context_, *request);
}

UnaryReactor* AdminService::CancelWork(CallContext* call, const v1::CancelWorkRequest* request,
                                       v1::CancelWorkResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const Result<bool> ran = context_->store().requests().Cancel(0, request->sequence());
    if (ran.ok()) response->set_was_running(*ran);
    return ran.status();
  });
}

}  // namespace kvstrata
