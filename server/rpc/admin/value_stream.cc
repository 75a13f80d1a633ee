// SPDX-License-Identifier: Apache-2.0
// ValueStream: the GetValue call: a value in pieces, since it may be larger than a message.
//
// Ownership: owns itself until gRPC is done with it. Threads: gRPC's, one at a time; the value is
// fetched on a work thread. Cost: a copy of the value, and one of each piece.
#include <algorithm>
#include <string>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_messages.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {
namespace {

constexpr size_t kPiece = size_t{1} << 20;  // a client takes messages of 4 MiB

class ValueStream final : public grpc::ServerWriteReactor<v1::GetValueResponse> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static ValueStream* Start(ServiceContext* context, const v1::GetValueRequest& request) {
    auto* stream = new ValueStream;  // ends in OnDone, which waits for Finish
    context->queue()->Post([stream, context, key = request.key()] {
      const Status status = stream->Fetch(context, key);
      if (!status.ok()) return stream->Finish(ToGrpc(status));
      stream->WriteNext();
    });
    return stream;
  }

  void OnWriteDone(bool ok) override {
    if (at_ == bytes_.size()) return;  // finished already
    if (!ok) return Finish(grpc::Status::CANCELLED);
    response_.Clear();
    WriteNext();
  }
  void OnDone() override { delete this; }

 private:
  ValueStream() = default;
  Status Fetch(ServiceContext* context, const std::string& key) {
    KVS_RETURN_IF_ERROR(context->CheckAdmin());
    KVS_RETURN_IF_ERROR(CheckValueKey(key));
    if (!context->options().values.get)
      return Unimplemented("ADMIN_VALUES_UNIMPLEMENTED", "no values");
    KVS_ASSIGN_OR_RETURN(const ValueBytes value, context->options().values.get(key));
    response_.set_tier(std::string(NameOf(value.from)));
    for (const auto& buffer : value.buffers) {
      response_.add_buffers(buffer.size());
      bytes_.append(reinterpret_cast<const char*>(buffer.data()), buffer.size());
    }
    return OkStatus();
  }
  void WriteNext() {
    const size_t n = std::min(kPiece, bytes_.size() - at_);
    response_.set_data(bytes_.substr(at_, n));
    at_ += n;
    if (at_ < bytes_.size()) return StartWrite(&response_);
    StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
  }

  std::string bytes_;  // contents of the buffers
  size_t at_ = 0;      // written before
  v1::GetValueResponse response_;
};

}  // namespace

WriteReactor<v1::GetValueResponse>* AdminService::GetValue(CallContext*,
                                                           const v1::GetValueRequest* request) {
  return ValueStream::Start(context_, *request);
}

}  // namespace kvstrata
