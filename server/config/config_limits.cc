// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/quantities.h"
#include "server/config/config_keys.h"
#include "server/store/options/user_limits.h"
#include "server/store/options/user_name.h"

namespace kvstrata {
namespace {

constexpr std::string_view kPrefix = "limits.users.";

constexpr std::string_view kNumber = "0 to 1000000000; 0: none";
constexpr std::string_view kBytesOrShare = "a size, 0 to 1PiB, or 1% to 100%; 0: none";

std::string_view Allowed(Limit limit) { return CountsBytes(limit) ? kBytesOrShare : kNumber; }

std::optional<LimitSetting> Parse(Limit limit, std::string_view text) {
  LimitSetting setting;
  if (CountsBytes(limit) && text.ends_with('%')) {
    uint64_t percent = 0;
    text.remove_suffix(1);
    if (!ParseNumber(text, &percent) || percent < 1 || percent > 100) return std::nullopt;
    setting.percent = static_cast<uint32_t>(percent);
    return setting;
  }
  const bool parsed =
      CountsBytes(limit) ? ParseSize(text, &setting.value) : ParseNumber(text, &setting.value);
  if (!parsed || setting.value > MostOf(limit)) return std::nullopt;
  return setting;
}

template <Limit kLimit>
bool ApplyDefault(std::string_view text, Config* config) {
  const std::optional<LimitSetting> setting = Parse(kLimit, text);
  if (setting) config->limits[kLimit] = *setting;
  return setting.has_value();
}

constexpr std::array<ConfigKey, kLimits> kLimitKeys = {{
    {"limits.sessions", "512", kNumber,
     "sessions of one user, those that ended while their process lives among them",
     ApplyDefault<Limit::kSessions>, false, true},
    {"limits.attaches_per_second", "200", kNumber, "how often one user may attach within a second",
     ApplyDefault<Limit::kAttachesPerSecond>, false, true},
    {"limits.connections", "256", kNumber, "connections of one user to the gRPC socket",
     ApplyDefault<Limit::kConnections>, false, true},
    {"limits.models", "256", kNumber, "models that sessions of one user have registered",
     ApplyDefault<Limit::kModels>, false, true},
    {"limits.sequences", "16384", kNumber, "open sequences of one user",
     ApplyDefault<Limit::kSequences>, false, true},
    {"limits.device_bytes", "90%", kBytesOrShare,
     "what one user may hold of all device pools together", ApplyDefault<Limit::kDeviceBytes>,
     false, true},
    {"limits.host_bytes", "90%", kBytesOrShare, "what one user may hold of the host pool",
     ApplyDefault<Limit::kHostBytes>, false, true},
    {"limits.queued_work", "256", kNumber,
     "of one user: builds, and sequences in the workers' queue", ApplyDefault<Limit::kQueuedWork>,
     false, true},
}};

uint64_t ValueOf(Limit limit, const LimitSetting& setting, uint64_t device, uint64_t host) {
  if (setting.percent == 0) return setting.value;
  const uint64_t pool = limit == Limit::kDeviceBytes ? device : host;
  return std::max<uint64_t>(1, pool / 100 * setting.percent + pool % 100 * setting.percent / 100);
}

}  // namespace

std::span<const ConfigKey> LimitKeys() { return kLimitKeys; }

bool IsUserLimitKey(std::string_view key) { return key.starts_with(kPrefix); }

Status ApplyUserLimit(std::string_view key, std::string_view value, std::string_view where,
                      Config* config) {
  const std::string_view rest = key.substr(kPrefix.size());
  const size_t point = std::min(rest.rfind('.'), rest.size());
  const std::string user(rest.substr(0, point));
  const auto fail = [&](std::string_view reason, const std::string& why) {
    return InvalidArgument(std::string(reason), std::string(where) + ": " + why);
  };
  if (!UidOf(user)) {
    return fail("CONFIG_KEY", std::string(key) + ": user '" + user +
                                  "'; allowed: \"uid:N\", such as limits.users.\"uid:1000\"");
  }
  const std::string name(rest.substr(std::min(point + 1, rest.size())));
  const std::optional<Limit> limit = LimitOf(name);
  if (!limit) {
    return fail("CONFIG_KEY",
                std::string(key) + ": no limit '" + name + "'; allowed: " + LimitNames());
  }
  const std::optional<LimitSetting> setting = Parse(*limit, value);
  if (!setting) {
    return fail("CONFIG_VALUE", std::string(key) + " = '" + std::string(value) +
                                    "'; allowed: " + WithUnits(Allowed(*limit)));
  }
  config->user_limits[user][*limit] = *setting;
  return OkStatus();
}

UserLimitsOptions UserLimitsOf(const Config& config, uint64_t device_bytes, uint64_t host_bytes) {
  UserLimitsOptions options;
  options.operators = {UserName(0), UserName(geteuid())};
  for (const auto& [limit, setting] : config.limits) {
    options.defaults[limit] = ValueOf(limit, setting, device_bytes, host_bytes);
  }
  for (const auto& [user, limits] : config.user_limits) {
    for (const auto& [limit, setting] : limits) {
      options.users[user][limit] = ValueOf(limit, setting, device_bytes, host_bytes);
    }
  }
  return options;
}

}  // namespace kvstrata
