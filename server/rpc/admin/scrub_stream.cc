// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/scrub_stream.h"

#include <utility>

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetween{250};

}  // namespace

ScrubStream* ScrubStream::Start(ServiceContext* context, const v1::ScrubRequest& request) {
  std::shared_ptr<ScrubStream> stream(new ScrubStream(context));
  stream->self_ = stream;
  const Status status = stream->Begin(request);
  if (!status.ok()) stream->Finish(ToGrpc(status));
  return stream.get();
}

Status ScrubStream::Begin(const v1::ScrubRequest& request) {
  KVS_RETURN_IF_ERROR(context_->CheckAdmin());
  if (!context_->options().scrub) return ServiceContext::NoDisk();
  TierScrub scrub;
  scrub.bytes_per_second = request.bytes_per_second();
  scrub.progress = [self = shared_from_this()](const ScrubProgress& p) {
    return self->Progress(p);
  };
  scrub.done = [self = shared_from_this()](const Status& why) { self->Ended(why); };
  return context_->options().scrub(std::move(scrub));
}

void ScrubStream::FillIn(const ScrubProgress& p) {
  response_.set_values(p.values);
  response_.set_bytes(p.bytes);
  response_.set_corrupt(p.corrupt);
  response_.set_late(p.late);
  response_.set_orphans(p.orphans);
  if (context_->options().disk) response_.set_entries(context_->options().disk().entries);
}

bool ScrubStream::Progress(const ScrubProgress& progress) {
  MutexLock lock(mu_);
  so_far_ = progress;
  if (cancelled_) return false;
  if (writing_ || Clock::now() - told_ < kBetween) return true;
  FillIn(progress);
  told_ = Clock::now();
  writing_ = true;
  StartWrite(&response_);
  return true;
}

void ScrubStream::Ended(const Status& why) {
  MutexLock lock(mu_);
  ended_ = true;
  why_ = why;
  if (!writing_) FinishLocked();
}

void ScrubStream::FinishLocked() {
  FillIn(so_far_);
  response_.set_done(why_.ok());
  writing_ = true;  // nothing may follow
  StartWriteAndFinish(&response_, grpc::WriteOptions(), ToGrpc(why_));
}

void ScrubStream::OnWriteDone(bool) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ended_) FinishLocked();
}

void ScrubStream::OnCancel() {
  MutexLock lock(mu_);
  cancelled_ = true;
}

void ScrubStream::OnDone() {
  const std::shared_ptr<ScrubStream> last = std::move(self_);
  under_way_.End();
}

}  // namespace kvstrata
