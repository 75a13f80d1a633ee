// SPDX-License-Identifier: Apache-2.0
// ScrubStream: the Scrub call. The disk's reader tells how far it is; the call's end is the
// scrub's.
//
// Ownership: a stream owns itself until gRPC is done with it; the scrub holds a share. Threads:
// any. Cost: a message when the one before was taken, at most four a second.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_SCRUB_STREAM_H_
#define KVSTRATA_SERVER_RPC_ADMIN_SCRUB_STREAM_H_

#include <chrono>
#include <memory>

#include "base/sync.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class ScrubStream final : public grpc::ServerWriteReactor<v1::ScrubResponse>,
                          public std::enable_shared_from_this<ScrubStream> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static ScrubStream* Start(ServiceContext* context, const v1::ScrubRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  explicit ScrubStream(ServiceContext* context) : context_(context), under_way_(context->calls()) {}
  Status Begin(const v1::ScrubRequest& request);
  // Called by the disk's reader; false: nobody listens any more.
  bool Progress(const ScrubProgress& progress) KVS_EXCLUDES(mu_);
  void Ended(const Status& why) KVS_EXCLUDES(mu_);
  void FillIn(const ScrubProgress& progress) KVS_REQUIRES(mu_);
  void FinishLocked() KVS_REQUIRES(mu_);

  ServiceContext* const context_;
  CallUnderWay under_way_;             // until OnDone
  std::shared_ptr<ScrubStream> self_;  // until OnDone

  Mutex mu_;
  ScrubProgress so_far_ KVS_GUARDED_BY(mu_);
  v1::ScrubResponse response_ KVS_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point told_ KVS_GUARDED_BY(mu_);
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
  bool ended_ KVS_GUARDED_BY(mu_) = false;
  Status why_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_SCRUB_STREAM_H_
