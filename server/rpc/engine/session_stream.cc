// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/engine/session_stream.h"

#include <string>
#include <utility>
#include <vector>

#include "server/rpc/steps/step_runner.h"
#include "server/sockets/packet.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxClientName = 63;

}  // namespace

void SessionStreams::EndAll(const Status& why) {
  std::vector<std::shared_ptr<SessionStream>> streams;
  {
    MutexLock lock(mu_);
    ended_ = why;
    streams.assign(streams_.begin(), streams_.end());
  }
  // Outside the lock: finishing may run OnDone on this thread.
  for (const auto& stream : streams) stream->End(why);
}

void SessionStreams::End(uint64_t session) {
  std::shared_ptr<SessionStream> found;
  {
    MutexLock lock(mu_);
    for (const auto& stream : streams_) {
      if (stream->session() == session) found = stream;
    }
  }
  if (found != nullptr) found->End(OkStatus());
}

Status SessionStreams::Add(std::shared_ptr<SessionStream> stream) {
  MutexLock lock(mu_);
  streams_.insert(std::move(stream));
  return ended_;
}

void SessionStreams::Remove(const std::shared_ptr<SessionStream>& stream) {
  MutexLock lock(mu_);
  streams_.erase(stream);
}

SessionStream* SessionStream::Start(ServiceContext* context, SessionStreams* streams,
                                    const v1::OpenSessionRequest& request) {
  std::shared_ptr<SessionStream> stream(new SessionStream(context, streams));
  stream->self_ = stream;
  Status status = streams->Add(stream);
  if (status.ok()) status = stream->Open(request);
  if (status.ok()) {
    stream->StartWrite(&stream->response_);
  } else {
    stream->End(status);
  }
  return stream.get();
}

// Where the pages lie decides, as on the linked transport.
Result<std::unique_ptr<StepDevice>> SessionStream::StepsOf(const std::string& backend,
                                                           uint32_t device) const {
  const GrpcOptions& options = context_->options();
  if (context_->store().devices().handle_type(Tier::kDevice) == HandleType::kMemfd) {
    const Backend* found = options.backend;
    if (!backend.empty()) {
      KVS_ASSIGN_OR_RETURN(found, FindBackend(backend));
    }
    return NewCpuSteps(found, options.executor);
  }
  if (options.cuda == nullptr) {
    return Unimplemented("TRANSPORT_UNAVAILABLE",
                         "the device pool is memory that this daemon does not "
                         "compute on; link libkvstrata.so");
  }
  if (!backend.empty() && backend != "cuda") {
    return InvalidArgument("BACKEND_UNKNOWN", "backend is '" + Printable(backend) +
                                                  "'; the daemon's pages lie on " +
                                                  context_->store().devices().DeviceName(device) +
                                                  ", where 'cuda' alone computes");
  }
  return NewGpuSteps(options.cuda, options.cuda_devices[device], &context_->store(), device,
                     options.executor, options.cuda_patience);
}

Status SessionStream::Open(const v1::OpenSessionRequest& request) {
  const GrpcOptions& options = context_->options();
  if (request.client_name().size() > kMaxClientName) {
    return InvalidArgument("TEXT_INVALID", "client_name has " +
                                               std::to_string(request.client_name().size()) +
                                               " bytes; at most 63 are allowed");
  }
  KVS_ASSIGN_OR_RETURN(const uint32_t device,
                       context_->store().devices().FindDevice(Printable(request.device_uuid())));
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<StepDevice> steps, StepsOf(request.backend(), device));
  const std::string backend(steps->backend());
  const std::string name =
      request.client_name().empty() ? "unnamed" : Printable(request.client_name());
  // Nobody needs descriptors before somebody redeems a token (Sessions::PassArenas).
  KVS_ASSIGN_OR_RETURN(const SessionSegments segments, context_->store().sessions().OpenSession(
                                                           context_->user(), Transport::kRemote,
                                                           name, [](const ArenaGrant&) {}, device));
  context_->AddSession(std::make_shared<RemoteSession>(&context_->store(), segments,
                                                       std::move(steps), context_->queue()));
  session_ = segments.session;
  response_.set_session(segments.session);
  response_.set_daemon_epoch(segments.daemon_epoch);
  response_.set_backend(backend);
  response_.set_version(options.version);
  LogEvent(LogLevel::kInfo, "session_opened",
           {{"session", segments.session},
            {"transport", "remote"},
            {"uid", context_->user().uid},
            {"client", name}});
  return OkStatus();
}

void SessionStream::End(const Status& why) {
  if (!finished_.exchange(true)) Finish(ToGrpc(why));
}

void SessionStream::OnWriteDone(bool ok) {
  if (!ok) OnCancel();
}

void SessionStream::OnCancel() {
  if (!finished_.exchange(true)) Finish(grpc::Status::CANCELLED);
}

void SessionStream::OnDone() {
  // CloseSession may have taken it.
  std::shared_ptr<RemoteSession> session = context_->TakeSession(session_);
  if (session != nullptr) RemoteSession::End(std::move(session), nullptr);
  const std::shared_ptr<SessionStream> last = std::move(self_);
  streams_->Remove(last);
  under_way_.End();
}

}  // namespace kvstrata
