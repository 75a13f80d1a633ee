// SPDX-License-Identifier: Apache-2.0
// RecordCalls: what every call of our services leaves behind: its time (of calls with one answer),
// its refusal (refusals.h), and, of an operator's verb that changes something or reads users'
// caches, the event "admin" with who and what. Verbs that only look are events of level debug, and
// so is a call that its client gave up before its request came ("cancelled"): that is no refusal.
//
// A record tells single numbers, flags and short texts of a request, never lists and bytes: those
// are token ids. Owned by the server that it is given to. Threads: gRPC's. Cost: two looks at the
// clock.
#ifndef KVSTRATA_SERVER_RPC_CALLS_CALL_RECORDS_H_
#define KVSTRATA_SERVER_RPC_CALLS_CALL_RECORDS_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "server/rpc/calls/grpc_connections.h"

namespace kvstrata {

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> RecordCalls(
    uint32_t uid, UserProcess process);

// "tier=host bytes=1048576 tokens[7]": fields that are set, by their names; of lists their lengths.
std::string Outline(const google::protobuf::Message& request);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_CALL_RECORDS_H_
