// SPDX-License-Identifier: Apache-2.0
// The remote tier in the configuration: the keys remote.*, and what its engine gets of them.
// Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_REMOTE_H_
#define KVSTRATA_SERVER_CONFIG_REMOTE_H_

#include <span>

#include "server/config_keys.h"
#include "server/work/redis_value_tier.h"

namespace kvstrata {

std::span<const ConfigKey> RemoteKeys();

// Of remote.redis, none: without servers.
RedisTierOptions RedisOptionsOf(const RemoteConfig& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_REMOTE_H_
