// SPDX-License-Identifier: Apache-2.0
// CallInterceptors: what gRPC does around every call of our services.
//
// A call leaves behind its time (of calls with one answer), its refusal (refusals.h), and, of an
// operator's verb that changes something or reads users' caches, the event "admin" with who and
// what. Verbs that only look are events of level debug, and so is a call that its client gave up
// before its request came ("cancelled"): that is no refusal. A record tells single numbers, flags
// and short texts of a request, never lists and bytes: those are token ids.
//
// A call whose request is no message answers INVALID_ARGUMENT REQUEST_MALFORMED. gRPC's callback
// API never asks the service then, and answers UNIMPLEMENTED without a word, as if there were no
// such call.
//
// Owned by the server that they are given to. Threads: gRPC's. Cost: two looks at the clock.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "server/rpc/calls/grpc_connections.h"

namespace kvstrata {

// For the calls of user `uid`.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
CallInterceptors(uint32_t uid, UserProcess process);

}  // namespace kvstrata
