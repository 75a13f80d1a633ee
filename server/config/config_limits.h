// SPDX-License-Identifier: Apache-2.0
// The users' limits in the configuration: the keys limits.*, and limits.users.USER.LIMIT for one
// user alone. Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_CONFIG_LIMITS_H_
#define KVSTRATA_SERVER_CONFIG_CONFIG_LIMITS_H_

#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/config/config_keys.h"
#include "server/store/options/user_limits.h"

namespace kvstrata {

std::span<const ConfigKey> LimitKeys();

// "limits.users.uid:1000.sessions".
bool IsUserLimitKey(std::string_view key);
// INVALID_ARGUMENT CONFIG_KEY (no such user or limit) or CONFIG_VALUE; `where` it was given is for
// the message.
Status ApplyUserLimit(std::string_view key, std::string_view value, std::string_view where,
                      Config* config);

// What Config says, with shares of pools as bytes. The pools' sizes: of all devices together, of
// the host.
UserLimitsOptions UserLimitsOf(const Config& config, uint64_t device_bytes, uint64_t host_bytes);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_CONFIG_LIMITS_H_
