// SPDX-License-Identifier: Apache-2.0
// What a call answers whose request is no message. gRPC's callback API then never asks the service
// and answers UNIMPLEMENTED without a word, as if there were no such call; here it becomes
// INVALID_ARGUMENT REQUEST_MALFORMED.
//
// Owned by the server that it is given to. Threads: gRPC's. Cost: a look at each call's status.
#ifndef KVSTRATA_SERVER_RPC_CALLS_MALFORMED_REQUESTS_H_
#define KVSTRATA_SERVER_RPC_CALLS_MALFORMED_REQUESTS_H_

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <vector>

namespace kvstrata {

using InterceptorFactories =
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>;

InterceptorFactories NameMalformedRequests();

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_MALFORMED_REQUESTS_H_
