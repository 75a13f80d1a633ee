// SPDX-License-Identifier: Apache-2.0
// ConfigReload: what the daemon runs with, and a second look at the files that it was read from.
// Flags and the environment stay what they were at the start, and win as they did then.
//
// All or nothing: with a mistake in any file nothing changes. Of keys that changed, those that
// ConfigKey::reloads says are applied, the others keep their running value until a restart; both
// are told, to the caller and as events ("config_changed", "reloaded", "reload_failed").
//
// Thread-safety: all methods, from any thread; reloads come one after the other. Cost: reads the
// files. Errors of Reload: those of ReadConfig.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "server/config/config.h"

namespace kvstrata {

struct ConfigChange {
  std::string key;
  std::string before, after;  // "": of a table's key (plans.NAME): it was, or is, not there
  std::string where;          // where `after` was given, as ConfigEntry
  bool applies = false;       // else it needs a restart
};

// What is different in `next`, in its order; keys that are gone come last.
std::vector<ConfigChange> ChangesOf(std::span<const ConfigEntry> running,
                                    std::span<const ConfigEntry> next);

class ConfigReload {
 public:
  // `apply` makes the daemon's parts have what reloads of a configuration.
  ConfigReload(const Config& running, std::function<void(const Config&)> apply)
      : sources_(running.sources), apply_(std::move(apply)), entries_(running.entries) {}

  // By whom: "SIGHUP", "uid:0". A dry run changes and logs nothing.
  Result<std::vector<ConfigChange>> Reload(bool dry_run, std::string_view by)
      KVS_EXCLUDES(reloading_, mu_);
  // log.level until the daemon ends, or a reload finds another in the files; INVALID_ARGUMENT
  // CONFIG_VALUE. "": changes nothing. The level before.
  Result<std::string> SetLevel(std::string_view level, std::string_view by)
      KVS_EXCLUDES(reloading_, mu_);
  // What the daemon runs with now.
  std::vector<ConfigEntry> entries() const KVS_EXCLUDES(mu_);

 private:
  const ConfigSources sources_;
  const std::function<void(const Config&)> apply_;
  Mutex reloading_;
  mutable Mutex mu_;
  std::vector<ConfigEntry> entries_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
