// SPDX-License-Identifier: Apache-2.0
// What the gRPC library does on its own and the daemon does not let it: logs and threads.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

namespace kvstrata {

// What gRPC and protobuf write to stderr becomes events of the daemon's log ("grpc", "protobuf"):
// in its format, at most five lines a second of each, since a peer can provoke them, and without
// what a peer sent. For the whole process, and for good. Any thread; idempotent.
void TakeOverLibraryLogs();

// WithoutThreads: leaves reflection out of a gRPC server, the one service that is not of the
// callback kind: it has threads of its own, and gRPC aborts when it cannot make them.
class WithoutThreads final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const auto& plugin) { return plugin->has_sync_methods(); });
  }
};

}  // namespace kvstrata
