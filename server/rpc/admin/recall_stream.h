// SPDX-License-Identifier: Apache-2.0
// RecallStream: the AuditRecall call. It starts a recall audit in the store, tells its progress,
// and ends with the report and with how the audit ended. The call's end is the audit's, and the
// other way round: a client that goes away, or the deadline, ends it in the store too.
//
// Ownership: a stream owns itself until gRPC is done with it; the audit's listener and the alarm
// hold shares. Threads: any. Cost: reports are made on work threads.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_RECALL_STREAM_H_
#define KVSTRATA_SERVER_RPC_ADMIN_RECALL_STREAM_H_

#include <grpcpp/alarm.h>

#include <chrono>
#include <memory>

#include "base/sync.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class RecallStream final : public grpc::ServerWriteReactor<v1::AuditRecallResponse>,
                           public std::enable_shared_from_this<RecallStream> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static RecallStream* Start(ServiceContext* context, const v1::AuditRecallRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  explicit RecallStream(ServiceContext* context)
      : context_(context), under_way_(context->calls()) {}
  Status Begin(const v1::AuditRecallRequest& request);
  void SetDeadline();
  // Something was added, or it ended; from the store.
  void Changed();
  // Writes what there is to say, unless a write is under way: then its end comes back here.
  void Tell() KVS_EXCLUDES(mu_);
  // Ends the audit, which ends the call. Nothing if it has ended.
  void EndAudit(const Status& why);

  ServiceContext* const context_;
  CallUnderWay under_way_;              // until OnDone
  std::shared_ptr<RecallStream> self_;  // until OnDone

  // Constant after Start.
  std::shared_ptr<RecallAudit> audit_;  // null: it was refused
  uint64_t sequence_ = 0;
  std::chrono::microseconds timeout_{0};
  grpc::Alarm deadline_;

  Mutex mu_;
  v1::AuditRecallResponse response_ KVS_GUARDED_BY(mu_);
  bool started_ KVS_GUARDED_BY(mu_) = false;
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool changed_ KVS_GUARDED_BY(mu_) = false;  // since the write under way began
  bool finished_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_RECALL_STREAM_H_
