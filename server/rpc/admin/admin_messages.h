// SPDX-License-Identifier: Apache-2.0
// What the store and the daemon tell an operator, as messages of kvstrata.v1.Admin. Pure functions.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_ADMIN_MESSAGES_H_
#define KVSTRATA_SERVER_RPC_ADMIN_ADMIN_MESSAGES_H_

#include "kvstrata/v1/admin.pb.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/store/options/cluster_tenants.h"
#include "server/store/store.h"

namespace kvstrata {

void Write(const PoolInfo& p, v1::Pool* out);
void Write(const CgroupInfo& c, v1::CgroupMemory* out);
void Write(const EvictedTier& t, v1::EvictedTier* out);
void Write(const PinInfo& p, v1::PinnedPrefix* out);
void Write(const SessionInfo& s, const ClusterTenants& tenants, v1::Session* out);
void Write(const SequenceInfo& s, v1::Sequence* out);
void Write(const ExtentInfo& e, v1::ExtentInfo* out);
void Write(const WorkInfo& w, v1::Work* out);
void Write(const PageInfo& p, v1::PageInfo* out);
void WriteCatalog(const Store& store, v1::GetStatusResponse* out);
// Refusals, latencies, bytes and steps.
void WriteTelemetry(const Store& store, v1::GetStatusResponse* out);
// Adds a room, once an engine has come.
void WriteChunks(const ChunkNumbers& numbers, v1::GetStatusResponse* out);
void Write(const DiskInfo& d, v1::Disk* out);
void Write(const RemoteInfo& r, const ClusterTenants& tenants, v1::Remote* out);
void Write(const LimitNumbers& n, v1::UserNumbers* out);
void Write(const UserReport& u, const ClusterTenants& tenants, v1::UserQuota* out);
bool HoldsAny(const UserReport& u);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_ADMIN_MESSAGES_H_
