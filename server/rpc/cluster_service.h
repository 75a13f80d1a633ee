// SPDX-License-Identifier: Apache-2.0
// ClusterService: kvstrata.v1.Cluster: what one daemon tells an operator of all nodes of its
// cluster. Every call of a user who is neither root nor the daemon's own answers PERMISSION_DENIED
// ADMIN_ONLY.
//
// Threads: gRPC's; no thread waits for a node. Errors: TIER_UNKNOWN, and those of
// GrpcOptions::lookup_cluster.
#pragma once

#include "kvstrata/v1/nodes.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class ClusterService final : public v1::Cluster::CallbackService {
 public:
  explicit ClusterService(ServiceContext* context) : context_(context) {}

  UnaryReactor* LookupCluster(CallContext*, const v1::LookupClusterRequest*,
                              v1::LookupClusterResponse*) override;

 private:
  ServiceContext* const context_;
};

}  // namespace kvstrata
