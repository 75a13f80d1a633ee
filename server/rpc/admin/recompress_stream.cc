// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/recompress_stream.h"

#include <chrono>

#include "server/rpc/admin/admin_messages.h"

namespace kvstrata {
namespace {

constexpr std::chrono::milliseconds kBetween{250};

}  // namespace

RecompressStream* RecompressStream::Start(ServiceContext* context,
                                          const v1::RecompressSequenceRequest& request) {
  std::shared_ptr<RecompressStream> stream(new RecompressStream(context, request.sequence()));
  stream->self_ = stream;
  const Status status = stream->Begin();
  if (status.ok()) {
    stream->Tell();
  } else {
    stream->Finish(ToGrpc(status));
  }
  return stream.get();
}

Status RecompressStream::Begin() {
  KVS_RETURN_IF_ERROR(context_->CheckAdmin());
  WorkRequests& requests = context_->store().requests();
  KVS_ASSIGN_OR_RETURN(const WorkProgress before, requests.Progress(0, sequence_));
  released_before_ = before.released_bytes;
  return requests.Recompress(0, sequence_,
                             [self = shared_from_this()](const Status& why) { self->Ended(why); });
}

void RecompressStream::FillIn() {
  const Result<WorkProgress> progress = context_->store().requests().Progress(0, sequence_);
  if (!progress.ok()) return;
  response_.Clear();
  if (!progress->done) Write(progress->work, response_.mutable_work());
  response_.set_extents(progress->extents);
  response_.set_released_bytes(progress->released_bytes - released_before_);
}

void RecompressStream::Tell() {
  MutexLock lock(mu_);
  if (ended_) return;
  if (!writing_) {
    FillIn();
    writing_ = true;
    StartWrite(&response_);
  }
  // Weak: the alarm is this object's own. A new one: the last may be in its callback.
  next_ = std::make_unique<grpc::Alarm>();
  next_->Set(std::chrono::system_clock::now() + kBetween, [weak = weak_from_this()](bool fired) {
    const std::shared_ptr<RecompressStream> self = weak.lock();
    if (fired && self != nullptr) self->Tell();
  });
}

void RecompressStream::Ended(const Status& why) {
  MutexLock lock(mu_);
  ended_ = true;
  why_ = why;
  if (!writing_) FinishLocked();
}

void RecompressStream::FinishLocked() {
  if (finished_) return;
  finished_ = writing_ = true;
  FillIn();
  response_.clear_work();
  response_.set_done(why_.ok());
  StartWriteAndFinish(&response_, grpc::WriteOptions(), ToGrpc(why_));
}

void RecompressStream::OnWriteDone(bool) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ended_) FinishLocked();
}

// Nobody listens any more: the work goes on.
void RecompressStream::OnCancel() {
  MutexLock lock(mu_);
  ended_ = true;
  why_ = {Code::kAborted, "CALL_CANCELLED", "the caller went away; the work goes on"};
  if (!writing_) FinishLocked();
}

void RecompressStream::OnDone() {
  under_way_.End();
  const std::shared_ptr<RecompressStream> last = std::move(self_);
}

}  // namespace kvstrata
