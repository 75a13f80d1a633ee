// SPDX-License-Identifier: Apache-2.0
// What the store and the daemon tell an operator, as messages of kvstrata.v1.Admin. Pure functions.
#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "kvstrata/v1/admin.pb.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/store/options/cluster_tenants.h"
#include "server/store/reports/value_info.h"
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

// The daemon's health in one look: the names of grpc.health.v1 and whether they serve, which every
// user that asks is told alike, and why, which operators are told.
//
//   ""                         the daemon: NOT_SERVING while it stops, or when GrpcOptions::health
//                              says anything but "serving" or "degraded: why"
//   kvstrata.v1.SERVICE        as the daemon
//   kvstrata.pool.host, kvstrata.pool.device, kvstrata.pool.device.NAME
//                              whether the pool is there (all devices'; one)
//   kvstrata.disk              where there is a disk tier: whether it is well
//   kvstrata.disk.writes       whether it also takes what is new: not while it drains
//   kvstrata.remote            where there is a remote tier: whether it is well
//
// What is lost of the daemon leaves "" SERVING: it goes on with less, and a restart is the
// operator's decision. Thread-safety: pure. Cost: a look at each pool, some locks.
struct HealthLook {
  std::string text;  // GrpcOptions::health's
  std::map<std::string, bool> names;
};

HealthLook LookAtHealth(const GrpcOptions& options);

// Values of memory and disk as messages, and the way back. Pure functions.

inline constexpr uint32_t kMaxListed = 4096;  // values of one list
inline constexpr int kMaxVerified = 64;       // keys of one call

// INVALID_ARGUMENT VALUE_KEY: neither 32 bytes nor the name of a pin's record.
Status CheckValueKey(const std::string& key);
// INVALID_ARGUMENT VALUE_FILTER.
Status CheckFilter(const v1::ListValuesRequest& request);

void Write(const ValueInfo& value, v1::Value* out);
void Write(const std::string& key, const ValueVerdict& verdict, v1::ValueVerdict* out);

}  // namespace kvstrata
