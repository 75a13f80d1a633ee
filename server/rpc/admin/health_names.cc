// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/health_names.h"

namespace kvstrata {

HealthLook LookAtHealth(const GrpcOptions& options) {
  HealthLook health{options.health ? options.health() : "serving", {}};
  std::map<std::string, bool>& names = health.names;
  const bool serves = health.text == "serving" || health.text.starts_with("degraded");
  names[""] = serves;
  for (const char* service : {"Control", "Compute", "Admin"}) {
    names[std::string("kvstrata.v1.") + service] = serves;
  }
  bool& devices = names["kvstrata.pool.device"] = true;
  for (const PoolInfo& pool : options.store->inspection().Pools()) {
    const std::string name = "kvstrata.pool." + std::string(NameOf(pool.tier));
    const bool there = pool.failure.empty();
    const bool host = pool.tier == Tier::kHost;
    names[host ? name : name + "." + pool.device] = there;
    devices = devices && (host || there);
  }
  if (options.disk) {
    const DiskInfo disk = options.disk();
    names["kvstrata.disk"] = !disk.sick;
    names["kvstrata.disk.writes"] = !disk.sick && !disk.draining;
  }
  if (options.remote) names["kvstrata.remote"] = options.remote().illness.empty();
  return health;
}

}  // namespace kvstrata
