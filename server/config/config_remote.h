// SPDX-License-Identifier: Apache-2.0
// The remote tier in the configuration: the keys remote.*, and what its engine gets of them.
// Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_CONFIG_REMOTE_H_
#define KVSTRATA_SERVER_CONFIG_CONFIG_REMOTE_H_

#include <span>
#include <string_view>

#include "base/status.h"
#include "server/config/config_keys.h"
#include "server/tier/redis/redis_value_tier.h"

namespace kvstrata {

std::span<const ConfigKey> RemoteKeys();
// INVALID_ARGUMENT REMOTE_ENGINE: two engines are named, or what the named one has not.
Status CheckRemoteEngine(const RemoteConfig& config);

// "remote.tenants.uid:1000.name": what a user of this node is to the remote tier.
bool IsTenantKey(std::string_view key);
// Whether a reload applies it. REQUIRES: IsTenantKey.
bool TenantKeyReloads(std::string_view key);
// INVALID_ARGUMENT CONFIG_KEY (no such user or key) or CONFIG_VALUE (also a tenant that another
// user of this node stands for); `where` it was given is for the message.
Status ApplyTenantKey(std::string_view key, std::string_view value, std::string_view where,
                      Config* config);
// Options by remote.redis; none: without servers.
RedisTierOptions RedisOptionsOf(const RemoteConfig& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_CONFIG_REMOTE_H_
