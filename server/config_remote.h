// SPDX-License-Identifier: Apache-2.0
// The remote tier in the configuration: the keys remote.*. Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_REMOTE_H_
#define KVSTRATA_SERVER_CONFIG_REMOTE_H_

#include <span>

#include "server/config_keys.h"

namespace kvstrata {

std::span<const ConfigKey> RemoteKeys();
// INVALID_ARGUMENT REMOTE_ENGINE: two engines are named, or what the named one has not.
Status CheckRemoteEngine(const RemoteConfig& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_REMOTE_H_
