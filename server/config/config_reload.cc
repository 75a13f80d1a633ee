// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_reload.h"

#include <algorithm>

#include "server/config/config_keys.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

const ConfigEntry* Find(std::span<const ConfigEntry> entries, std::string_view key) {
  const auto at = std::ranges::find(entries, key, &ConfigEntry::key);
  return at == entries.end() ? nullptr : &*at;
}

// For what needs a restart the running value stays, also of a table's key that is new or gone, and
// is told again by the next reload.
std::vector<ConfigEntry> AppliedOf(std::span<const ConfigEntry> running,
                                   std::span<const ConfigEntry> next) {
  std::vector<ConfigEntry> applied;
  for (const ConfigEntry& entry : next) {
    const ConfigEntry* was = Find(running, entry.key);
    const bool applies = entry.reloads || (was != nullptr && was->value == entry.value);
    if (applies || was != nullptr) applied.push_back(applies ? entry : *was);
  }
  for (const ConfigEntry& entry : running) {
    if (!entry.reloads && Find(next, entry.key) == nullptr) applied.push_back(entry);
  }
  return applied;
}

void LogChanges(const std::vector<ConfigChange>& changes, std::string_view by) {
  size_t restart = 0;
  for (const ConfigChange& c : changes) {
    restart += c.applies ? 0 : 1;
    LogEvent(c.applies ? LogLevel::kInfo : LogLevel::kWarn, "config_changed",
             {{"key", c.key},
              {"before", c.before},
              {"after", c.after},
              {"where", c.where},
              {"effect", c.applies ? "applied" : "needs a restart"},
              {"by", by}});
  }
  LogEvent(LogLevel::kInfo, "reloaded",
           {{"by", by}, {"applied", changes.size() - restart}, {"need_restart", restart}});
}

}  // namespace

std::vector<ConfigChange> ChangesOf(std::span<const ConfigEntry> running,
                                    std::span<const ConfigEntry> next) {
  std::vector<ConfigChange> changes;
  for (const ConfigEntry& entry : next) {
    const ConfigEntry* was = Find(running, entry.key);
    if (was != nullptr && was->value == entry.value) continue;
    changes.push_back({entry.key, was == nullptr ? "" : was->value, entry.value, entry.where,
                       Reloads(entry.key)});
  }
  for (const ConfigEntry& entry : running) {
    if (Find(next, entry.key) != nullptr) continue;
    changes.push_back({entry.key, entry.value, "", "", Reloads(entry.key)});
  }
  return changes;
}

Result<std::vector<ConfigChange>> ConfigReload::Reload(bool dry_run, std::string_view by) {
  MutexLock one(reloading_);
  LoadedConfig next = ReadConfig(sources_);
  if (!next.mistakes.empty()) {
    for (const Status& mistake : next.mistakes) {
      if (dry_run) break;
      LogEvent(LogLevel::kError, "reload_failed",
               {{"by", by}, {"reason", mistake.reason()}, {"why", mistake.message()}});
    }
    return Joined(next.mistakes);
  }
  const std::vector<ConfigEntry> running = entries();
  std::vector<ConfigChange> changes = ChangesOf(running, next.config.entries);
  if (dry_run) return changes;
  apply_(next.config);
  {
    MutexLock lock(mu_);
    entries_ = AppliedOf(running, next.config.entries);
  }
  LogChanges(changes, by);
  return changes;
}

Result<std::string> ConfigReload::SetLevel(std::string_view level, std::string_view by) {
  constexpr std::string_view kKey = "log.level";
  MutexLock one(reloading_);
  LogLevel parsed{};
  if (!level.empty() && !ParseLogLevel(level, &parsed)) {
    return InvalidArgument("CONFIG_VALUE",
                           std::string(kKey) + " = '" + std::string(level) +
                               "'; allowed: " + std::string(FindConfigKey(kKey)->allowed));
  }
  MutexLock lock(mu_);
  ConfigEntry& entry = *std::ranges::find(entries_, kKey, &ConfigEntry::key);
  const std::string before = entry.value;
  if (level.empty()) return before;
  SetLogLevel(parsed);
  entry.value = level;
  entry.origin = "operator";
  entry.where = by;
  LogEvent(LogLevel::kInfo, "log_level_set", {{"before", before}, {"after", level}, {"by", by}});
  return before;
}

std::vector<ConfigEntry> ConfigReload::entries() const {
  MutexLock lock(mu_);
  return entries_;
}

}  // namespace kvstrata
