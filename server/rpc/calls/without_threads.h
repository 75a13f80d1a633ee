// SPDX-License-Identifier: Apache-2.0
// WithoutThreads: leaves reflection out of a gRPC server, the one service that is not of the
// callback kind: it has threads of its own, and gRPC aborts when it cannot make them.
#ifndef KVSTRATA_SERVER_RPC_CALLS_WITHOUT_THREADS_H_
#define KVSTRATA_SERVER_RPC_CALLS_WITHOUT_THREADS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

namespace kvstrata {

class WithoutThreads final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const auto& plugin) { return plugin->has_sync_methods(); });
  }
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_CALLS_WITHOUT_THREADS_H_
