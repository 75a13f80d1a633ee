// SPDX-License-Identifier: Apache-2.0
// RecompressStream: the RecompressSequence call. Asks for the sequence's recompression and tells
// how far it is until that is over; the call's end leaves the work going on.
//
// Ownership: a stream owns itself until gRPC is done with it and the store has answered. Threads:
// any. Cost: a look at the sequence and a message, at most four a second.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_RECOMPRESS_STREAM_H_
#define KVSTRATA_SERVER_RPC_ADMIN_RECOMPRESS_STREAM_H_

#include <grpcpp/alarm.h>

#include <memory>

#include "base/sync.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"
#include "server/store/codecs/work_requests.h"

namespace kvstrata {

class RecompressStream final : public grpc::ServerWriteReactor<v1::RecompressSequenceResponse>,
                               public std::enable_shared_from_this<RecompressStream> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static RecompressStream* Start(ServiceContext* context,
                                 const v1::RecompressSequenceRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  RecompressStream(ServiceContext* context, uint64_t sequence)
      : context_(context), sequence_(sequence), under_way_(context->calls()) {}
  Status Begin();
  // Tells how far it is, now and again.
  void Tell() KVS_EXCLUDES(mu_);
  void Ended(const Status& why) KVS_EXCLUDES(mu_);
  // Unless the sequence is gone.
  void FillIn() KVS_REQUIRES(mu_);
  void FinishLocked() KVS_REQUIRES(mu_);

  ServiceContext* const context_;
  const uint64_t sequence_;
  CallUnderWay under_way_;  // until OnDone
  uint64_t released_before_ = 0;
  std::shared_ptr<RecompressStream> self_;  // until OnDone

  Mutex mu_;
  std::unique_ptr<grpc::Alarm> next_ KVS_GUARDED_BY(mu_);
  v1::RecompressSequenceResponse response_ KVS_GUARDED_BY(mu_);
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool ended_ KVS_GUARDED_BY(mu_) = false;
  bool finished_ KVS_GUARDED_BY(mu_) = false;
  Status why_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_RECOMPRESS_STREAM_H_
