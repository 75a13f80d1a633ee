// SPDX-License-Identifier: Apache-2.0
// ScrubStream: the Scrub call. The disk's reader tells how far it is; the call's end is the
// scrub's.
//
// The scrub holds a share. Cost: a message when the one before was taken, at most four a second.
#include <chrono>
#include <utility>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/shared_stream.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kScrubInterval{250};

class ScrubStream final : public ProgressStream<ScrubStream, v1::ScrubRequest, v1::ScrubResponse> {
 public:
  ScrubStream(ServiceContext* context, const v1::ScrubRequest&) : ProgressStream(context) {}
  Status Begin(const v1::ScrubRequest& request) {
    if (!context_->options().scrub) return ServiceContext::NoDisk();
    TierScrub scrub;
    scrub.bytes_per_second = request.bytes_per_second();
    scrub.progress = [self = shared_from_this()](const ScrubProgress& p) {
      return self->Progress(p);
    };
    scrub.done = [self = shared_from_this()](const Status& why) { self->End(why); };
    return context_->options().scrub(std::move(scrub));
  }

  void OnCancel() override {
    MutexLock lock(mu_);
    cancelled_ = true;
  }

 private:
  // Called by the disk's reader; false: nobody listens any more.
  bool Progress(const ScrubProgress& progress) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    so_far_ = progress;
    if (cancelled_) return false;
    if (writing() || Clock::now() - told_ < kScrubInterval) return true;
    TellLocked();
    told_ = Clock::now();
    return true;
  }
  void FillIn() override KVS_REQUIRES(mu_) {
    KVS_COPY_FIELDS((&response_), so_far_, values, bytes, corrupt, late, orphans);
    if (context_->options().disk) response_.set_entries(context_->options().disk().entries);
  }

  ScrubProgress so_far_ KVS_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point told_ KVS_GUARDED_BY(mu_);
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace

WriteReactor<v1::ScrubResponse>* AdminService::Scrub(CallContext*,
                                                     const v1::ScrubRequest* request) {
  return ScrubStream::Start(context_, *request);
}

}  // namespace kvstrata
