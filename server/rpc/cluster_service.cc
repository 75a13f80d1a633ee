// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/cluster_service.h"

#include <memory>
#include <string>
#include <utility>

namespace kvstrata {
namespace {

// Finishes the call once: when it is told to, or when nobody is left who would.
class Finish {
 public:
  explicit Finish(UnaryReactor* reactor) : reactor_(reactor) {}
  Finish(const Finish&) = delete;
  Finish& operator=(const Finish&) = delete;
  ~Finish() {
    if (reactor_ == nullptr) return;
    reactor_->Finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "the daemon has no memory to answer"});
  }
  void With(const Status& status) {
    const grpc::Status wire = ToGrpc(status);
    std::exchange(reactor_, nullptr)->Finish(wire);
  }

 private:
  UnaryReactor* reactor_;
};

}  // namespace

UnaryReactor* ClusterService::LookupCluster(CallContext* call,
                                            const v1::LookupClusterRequest* request,
                                            v1::LookupClusterResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  const auto& lookup = context_->options().lookup_cluster;
  if (!lookup) return ServiceContext::Answer(call, context_->NoRemote());
  if (context_->stopping()) return ServiceContext::Answer(call, ServiceContext::Stopping());
  UnaryReactor* reactor = context_->NewCall();
  const auto finish = std::make_shared<Finish>(reactor);
  const auto ask = [this, &lookup, request, response, finish] {
    const std::string& tenant =
        request->tenant().empty() ? context_->user().tenant : request->tenant();
    lookup(tenant, *request, response, [finish](const Status& status) { finish->With(status); });
  };
  (void)ServiceContext::Outcome([&] {
    context_->queue()->Post(ask);
    return OkStatus();
  });
  return reactor;
}

}  // namespace kvstrata
