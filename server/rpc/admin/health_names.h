// SPDX-License-Identifier: Apache-2.0
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
#ifndef KVSTRATA_SERVER_RPC_ADMIN_HEALTH_NAMES_H_
#define KVSTRATA_SERVER_RPC_ADMIN_HEALTH_NAMES_H_

#include <map>
#include <string>

#include "server/rpc/calls/grpc_options.h"

namespace kvstrata {

struct HealthLook {
  std::string text;  // GrpcOptions::health's
  std::map<std::string, bool> names;
};

HealthLook LookAtHealth(const GrpcOptions& options);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_HEALTH_NAMES_H_
