// SPDX-License-Identifier: Apache-2.0
// Calls of both services that ask something of the workers (server/store/codecs/work_requests.h).
#include <memory>
#include <utility>

#include "server/rpc/admin/admin_service.h"
#include "server/rpc/admin/recompress_stream.h"
#include "server/rpc/engine/compute_service.h"
#include "server/store/codecs/work_requests.h"

namespace kvstrata {
namespace {

// Response: a BuildResponse or a BuildSequenceResponse.
template <typename Response>
void Write(const BuildResult& built, Response* out) {
  out->set_plan(built.plan);
  out->set_indexed_tokens(built.indexed_tokens);
  out->set_built_blocks(built.built_blocks);
  out->set_extents(built.extents);
  out->set_done(built.done);
}

// Ends a call of a session on its strand; what it captures stays until then.
template <typename Fn>
void FinishOnStrand(grpc::CallbackServerContext* call, grpc::ServerUnaryReactor* reactor,
                    const std::shared_ptr<RemoteSession>& s, Fn fn) {
  if (call->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
  const Status posted = s->Post([reactor, s, fn = std::move(fn)] {
    reactor->Finish(ServiceContext::Outcome([&] { return fn(*s); }));
  });
  if (!posted.ok()) reactor->Finish(ToGrpc(posted));
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

grpc::ServerUnaryReactor* ComputeService::Build(grpc::CallbackServerContext* call,
                                                const v1::BuildRequest* request,
                                                v1::BuildResponse* response) {
  Result<std::shared_ptr<RemoteSession>> found = context_->FindSession(request->session());
  if (!found.ok()) return ServiceContext::Answer(call, found.status());
  grpc::ServerUnaryReactor* reactor = context_->NewCall();
  const auto answer = [call, reactor, request, response,
                       s = *found](const Result<BuildResult>& built) {
    if (!built.ok()) return reactor->Finish(ToGrpc(built.status()));
    Write(*built, response);
    if (!built->done) return reactor->Finish(grpc::Status::OK);
    FinishOnStrand(call, reactor, s, [request, response](RemoteSession& session) {
      return TakeBuilt(session, request->sequence(), response);
    });
  };
  const Status posted = (*found)->Post([this, reactor, request, answer, s = *found] {
    if (const Status idle = s->CheckIdle(request->sequence()); !idle.ok()) {
      return reactor->Finish(ToGrpc(idle));
    }
    const bool waits = !request->no_wait();
    const Result<BuildResult> now = context_->store().builds().Build(
        {s->id(), request->sequence(), request->plan()}, waits ? BuildDone(answer) : BuildDone());
    if (!now.ok() || now->done || !waits) answer(now);
  });
  if (!posted.ok()) reactor->Finish(ToGrpc(posted));
  return reactor;
}

grpc::ServerUnaryReactor* ComputeService::Recompress(grpc::CallbackServerContext* call,
                                                     const v1::RecompressRequest* request,
                                                     v1::RecompressResponse* response) {
  Result<std::shared_ptr<RemoteSession>> found = context_->FindSession(request->session());
  if (!found.ok()) return ServiceContext::Answer(call, found.status());
  grpc::ServerUnaryReactor* reactor = context_->NewCall();
  const Status posted = (*found)->Post([this, call, reactor, request, response, s = *found] {
    WorkRequests& requests = context_->store().requests();
    const uint64_t sequence = request->sequence();
    Status asked = s->CheckIdle(sequence);
    Result<WorkProgress> before = asked.ok() ? requests.Progress(s->id(), sequence) : asked;
    if (!before.ok()) return reactor->Finish(ToGrpc(before.status()));
    const auto answer = [&requests, call, reactor, response, s, sequence,
                         released = before->released_bytes,
                         waits = !request->no_wait()](const Status& settled) {
      if (!settled.ok()) return reactor->Finish(ToGrpc(settled));
      const Result<WorkProgress> after = requests.Progress(s->id(), sequence);
      if (!after.ok()) return reactor->Finish(ToGrpc(after.status()));
      response->set_extents(after->extents);
      response->set_released_bytes(after->released_bytes - released);
      response->set_done(after->done);
      if (!waits) return reactor->Finish(grpc::Status::OK);
      FinishOnStrand(call, reactor, s,
                     [sequence](RemoteSession& session) { return session.Settle(sequence); });
    };
    const bool waits = !request->no_wait();
    asked = requests.Recompress(s->id(), sequence, waits ? SettleDone(answer) : SettleDone());
    if (!asked.ok() || !waits) answer(asked);
  });
  if (!posted.ok()) reactor->Finish(ToGrpc(posted));
  return reactor;
}

grpc::ServerUnaryReactor* ComputeService::StopWork(grpc::CallbackServerContext* call,
                                                   const v1::StopWorkRequest* request,
                                                   v1::StopWorkResponse* response) {
  const Result<std::shared_ptr<RemoteSession>> found = context_->FindSession(request->session());
  if (!found.ok()) return ServiceContext::Answer(call, found.status());
  const Result<bool> ran = context_->store().requests().Cancel((*found)->id(), request->sequence());
  if (ran.ok()) response->set_was_running(*ran);
  return ServiceContext::Answer(call, ran.status());
}

grpc::ServerUnaryReactor* AdminService::BuildSequence(grpc::CallbackServerContext* call,
                                                      const v1::BuildSequenceRequest* request,
                                                      v1::BuildSequenceResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  grpc::ServerUnaryReactor* reactor = context_->NewCall();
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

grpc::ServerWriteReactor<v1::RecompressSequenceResponse>* AdminService::RecompressSequence(
    grpc::CallbackServerContext*, const v1::RecompressSequenceRequest* request) {
  return RecompressStream::Start(context_, *request);
}

grpc::ServerUnaryReactor* AdminService::CancelWork(grpc::CallbackServerContext* call,
                                                   const v1::CancelWorkRequest* request,
                                                   v1::CancelWorkResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  const Result<bool> ran = context_->store().requests().Cancel(0, request->sequence());
  if (ran.ok()) response->set_was_running(*ran);
  return ServiceContext::Answer(call, ran.status());
}

}  // namespace kvstrata
