// SPDX-License-Identifier: Apache-2.0
// ScrubStream: the Scrub call. The disk's reader tells how far it is; the call's end is the
// scrub's.
//
// The scrub holds a share. Cost: a message when the one before was taken, at most four a second.
#include <chrono>
#include <utility>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/shared_stream.h"

namespace kvstrata {
namespace {

class ScrubStream final : public SharedStream<ScrubStream, v1::ScrubRequest, v1::ScrubResponse> {
 public:
  ScrubStream(ServiceContext* context, const v1::ScrubRequest&) : SharedStream(context) {}
  Status Begin(const v1::ScrubRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;

 private:
  // Called by the disk's reader; false: nobody listens any more.
  bool Progress(const ScrubProgress& progress) KVS_EXCLUDES(mu_);
  void Ended(const Status& why) KVS_EXCLUDES(mu_);
  void FillIn(const ScrubProgress& progress) KVS_REQUIRES(mu_);
  void FinishLocked() KVS_REQUIRES(mu_);

  ScrubProgress so_far_ KVS_GUARDED_BY(mu_);
  v1::ScrubResponse response_ KVS_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point told_ KVS_GUARDED_BY(mu_);
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
  bool ended_ KVS_GUARDED_BY(mu_) = false;
  Status why_ KVS_GUARDED_BY(mu_);
};

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kScrubInterval{250};

Status ScrubStream::Begin(const v1::ScrubRequest& request) {
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
  if (writing_ || Clock::now() - told_ < kScrubInterval) return true;
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

}  // namespace

WriteReactor<v1::ScrubResponse>* AdminService::Scrub(CallContext*,
                                                     const v1::ScrubRequest* request) {
  return ScrubStream::Start(context_, *request);
}

}  // namespace kvstrata
