// SPDX-License-Identifier: Apache-2.0
// The table of the daemon's configuration keys: names, defaults, what is allowed, what they set.
// docs/configuration.md mirrors it. Constant; any thread.
#ifndef KVSTRATA_SERVER_CONFIG_CONFIG_KEYS_H_
#define KVSTRATA_SERVER_CONFIG_CONFIG_KEYS_H_

#include <span>
#include <string>
#include <string_view>

#include "server/config/config.h"

namespace kvstrata {

struct ConfigKey {
  std::string_view name, environment;
  std::string_view fallback;  // empty: LoadConfig fills it in
  std::string_view allowed, description;
  bool (*apply)(std::string_view value, Config* c);  // false: not allowed
  bool text = false;                                 // in a file it must be a string
  bool reloads = false;                              // config_reload.h applies it
};

std::span<const ConfigKey> ConfigKeys();
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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_CONFIG_KEYS_H_
