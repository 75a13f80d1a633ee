// SPDX-License-Identifier: Apache-2.0
// The table of the daemon's configuration keys: names, defaults, what is allowed, what they set.
// docs/configuration.md mirrors it. Constant; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/config/config.h"
#include "server/store/options/user_limits.h"

namespace kvstrata {

struct ConfigKey {
  std::string_view name;
  std::string_view fallback;  // empty: ReadConfig fills it in
  std::string_view allowed, description;
  bool (*apply)(std::string_view value, Config* c);  // false: not allowed
  bool text = false;                                 // in a file it must be a string
  bool reloads = false;                              // config_reload.h applies it
};

// What a key's last two members are called where they are set.
inline constexpr bool kAny = false, kText = true, kReloads = true;

std::span<const ConfigKey> ConfigKeys();
// "KVSTRATA_POOL_HOST_BYTES" for pool.host_bytes; for socket.path KVSTRATA_SOCKET.
std::string EnvironmentOf(const ConfigKey& key);
const ConfigKey* FindConfigKey(std::string_view name);  // null: there is none
// Whether a reload applies it; of any key, those of tables (plans.NAME, limits.users.USER.LIMIT,
// remote.tenants.USER.KEY) too.
bool Reloads(std::string_view name);
// Changes of one character that turn `a` into `b`.
size_t EditDistance(std::string_view a, std::string_view b);
// The nearest known key, also to one given without its section; "" if none is near.
std::string_view NearestConfigKey(std::string_view name);
// What `backend` allows.
std::string BackendNames();

// The users' limits in the configuration: the keys limits.*, and limits.users.USER.LIMIT for one
// user alone. Thread-safety: functions without state.

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

// The remote tier in the configuration: the keys remote.*, and what its engine gets of them.
// Thread-safety: functions without state.

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

}  // namespace kvstrata
