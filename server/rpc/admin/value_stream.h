// SPDX-License-Identifier: Apache-2.0
// ValueStream: the GetValue call: a value in pieces, since it may be larger than a message.
//
// Ownership: owns itself until gRPC is done with it. Threads: gRPC's, one at a time; the value is
// fetched on a work thread. Cost: a copy of the value, and one of each piece.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_VALUE_STREAM_H_
#define KVSTRATA_SERVER_RPC_ADMIN_VALUE_STREAM_H_

#include <string>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class ValueStream final : public grpc::ServerWriteReactor<v1::GetValueResponse> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static ValueStream* Start(ServiceContext* context, const v1::GetValueRequest& request);

  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  ValueStream() = default;
  Status Fetch(ServiceContext* context, const std::string& key);
  void WriteNext();

  std::string bytes_;  // contents of the buffers
  size_t at_ = 0;      // written before
  v1::GetValueResponse response_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_VALUE_STREAM_H_
