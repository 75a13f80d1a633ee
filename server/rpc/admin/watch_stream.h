// SPDX-License-Identifier: Apache-2.0
// WatchStream: the Watch call. Sends what the event ring has, then looks for more ten times a
// second: whoever logs an event knows nothing of watchers and waits for none. Between two messages
// a stream holds one batch of events, however slowly its caller reads.
//
// Ownership: a stream owns itself until gRPC is done with it; the alarm holds it weakly. Threads:
// any. Cost: a look at the ring ten times a second.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_WATCH_STREAM_H_
#define KVSTRATA_SERVER_RPC_ADMIN_WATCH_STREAM_H_

#include <grpcpp/alarm.h>

#include <cstdint>
#include <memory>

#include "base/sync.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class WatchStream final : public grpc::ServerWriteReactor<v1::WatchResponse>,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  static constexpr int kBatch = 64;  // events of a message

  // The reactor of a new call; valid until gRPC calls OnDone.
  static WatchStream* Start(ServiceContext* context, const v1::WatchRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  WatchStream(ServiceContext* context, const v1::WatchRequest& request);
  // Sends what there is, waits for more, or ends.
  void Tell() KVS_EXCLUDES(mu_);
  void FillIn() KVS_REQUIRES(mu_);
  void TellLater() KVS_REQUIRES(mu_);
  void FinishLocked(const grpc::Status& status) KVS_REQUIRES(mu_);

  ServiceContext* const context_;
  const bool follow_;
  CallUnderWay under_way_;             // until OnDone
  std::shared_ptr<WatchStream> self_;  // until OnDone

  Mutex mu_;
  std::unique_ptr<grpc::Alarm> next_ KVS_GUARDED_BY(mu_);
  v1::WatchResponse response_ KVS_GUARDED_BY(mu_);
  uint64_t after_ KVS_GUARDED_BY(mu_);  // the last event that was sent
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
  bool finished_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_WATCH_STREAM_H_
