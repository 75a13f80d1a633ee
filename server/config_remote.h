// SPDX-License-Identifier: Apache-2.0
// The remote tier in the configuration: the keys remote.*. Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_REMOTE_H_
#define KVSTRATA_SERVER_CONFIG_REMOTE_H_

#include <span>

#include "server/config_keys.h"

namespace kvstrata {

std::span<const ConfigKey> RemoteKeys();

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_REMOTE_H_
