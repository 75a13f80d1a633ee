// SPDX-License-Identifier: Apache-2.0
// The span of a call whose caller gave a traceparent (server/telemetry/spans.h).
#ifndef KVSTRATA_SERVER_RPC_CALLS_TRACED_CALL_H_
#define KVSTRATA_SERVER_RPC_CALLS_TRACED_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string_view>

#include "server/telemetry/spans.h"

namespace kvstrata {

// Null: it is not traced.
inline std::shared_ptr<RequestSpan> TracedCall(const grpc::CallbackServerContext& call,
                                               std::string_view name) {
  if (!Spans().enabled()) return nullptr;
  const auto found = call.client_metadata().find("traceparent");
  if (found == call.client_metadata().end()) return nullptr;
  return RequestSpan::Begin(name, {found->second.data(), found->second.size()});
}

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_TRACED_CALL_H_
