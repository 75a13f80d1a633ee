// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/malformed_requests.h"

#include <string_view>

#include "proto/status_map.h"

namespace kvstrata {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

// No service of ours refuses without a message.
bool NeverAsked(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty();
}

class MalformedRequest final : public grpc::experimental::Interceptor {
 public:
  void Intercept(InterceptorBatchMethods* call) override {
    if (call->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
        NeverAsked(call->GetSendStatus())) {
      call->ModifySendStatus(
          ToGrpc(InvalidArgument("REQUEST_MALFORMED",
                                 "the request is no message of this call: its bytes cannot be "
                                 "parsed, or there was no memory for it")));
    }
    call->Proceed();
  }
};

class RefusalFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // For the services' calls; gRPC takes the interceptor. Null: none. A call of no service is served
  // by gRPC as a stream both ways, of which we have none, and stays unimplemented.
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    const bool ours = std::string_view(info->method()).starts_with("/kvstrata.") &&
                      info->type() != ServerRpcInfo::Type::BIDI_STREAMING;
    return ours ? new MalformedRequest : nullptr;
  }
};

}  // namespace

InterceptorFactories NameMalformedRequests() {
  InterceptorFactories factories;
  factories.push_back(std::make_unique<RefusalFactory>());
  return factories;
}

}  // namespace kvstrata
