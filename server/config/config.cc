// SPDX-License-Identifier: Apache-2.0
#include "server/config/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "base/check.h"
#include "base/quantities.h"
#include "kernels/backend/backend.h"
#include "server/config/config_files.h"
#include "server/config/config_keys.h"

namespace kvstrata {
namespace {

constexpr std::string_view kPlanPrefix = "plans.";

Status WrongValue(const std::string& key, const Given& given, std::string_view allowed) {
  return InvalidArgument("CONFIG_VALUE", given.where + ": " + key + " = '" + given.value +
                                             "'; allowed: " + WithUnits(allowed));
}

ConfigEntry EntryOf(const std::string& key, const Given& given, std::string description) {
  const bool placed = given.origin == "file" || given.origin == "environment";
  return {key,
          given.value,
          std::string(given.origin),
          placed ? given.where : "",
          std::move(description),
          Reloads(key)};
}

bool IsPlanName(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == name.npos;
}

// --- environment and defaults --------------------------------------------------------------------

// A flag has the last word, and then nothing is to be said of the variable.
void AddEnvironment(const ConfigSources& sources, GivenByKey* out,
                    std::vector<std::string>* warnings) {
  const auto is_flag = [&sources](std::string_view key) {
    return std::ranges::any_of(sources.flags, [&](const auto& flag) { return flag.first == key; });
  };
  for (const auto& [name, value] : sources.environment) {
    const auto key = std::ranges::find(ConfigKeys(), name, EnvironmentOf);
    if (key != ConfigKeys().end()) {
      if (value.empty()) continue;
      Given& given = (*out)[std::string(key->name)];
      if (given.origin == "file" && given.value != value && !is_flag(key->name)) {
        warnings->push_back("environment variable " + name + " = '" + value + "' overrides " +
                            std::string(key->name) + " = '" + given.value + "' of " + given.where);
      }
      given = {value, "environment", name};
      continue;
    }
    // Clients have variables of their own: only what nearly is a key is worth a word.
    for (const ConfigKey& k : ConfigKeys()) {
      const std::string meant = EnvironmentOf(k);
      if (EditDistance(name, meant) <= 2) {
        warnings->push_back("environment variable " + name + " is not a key; did you mean " +
                            meant + "?");
        break;
      }
    }
  }
}

// The default PATH and the mode of its directory.
std::pair<std::string, mode_t> DefaultSocket(const ConfigSources& sources) {
  const auto xdg = sources.environment.find("XDG_RUNTIME_DIR");
  if (xdg != sources.environment.end() && xdg->second.substr(0, 1) == "/") {
    return {xdg->second + "/kvstrata/kvstratad.sock", 0700};
  }
  if (sources.uid == 0) return {"/run/kvstrata/kvstratad.sock", 0755};
  return {"/tmp/kvstrata-" + std::to_string(sources.uid) + "/kvstratad.sock", 0700};
}

std::string FallbackOf(const ConfigKey& key, const std::string& default_socket) {
  if (key.name == "socket.path") return default_socket;
  if (key.name == "backend") return std::string(Backends().front().name);
  return std::string(key.fallback);
}

void ApplyKeys(const GivenByKey& given, const std::string& default_socket, Config* c,
               Mistakes* mistakes) {
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name(key.name), fallback = FallbackOf(key, default_socket);
    const auto found = given.find(name);
    const Given value =
        found != given.end() ? found->second : Given{fallback, "default", "default"};
    const std::string allowed = key.name == "backend" ? BackendNames() : std::string(key.allowed);
    if ((key.text && !value.is_string) || !key.apply(value.value, c)) {
      mistakes->push_back(WrongValue(name, value, allowed));
      KVS_CHECK(key.apply(fallback, c));
    }
    c->entries.push_back(EntryOf(name, value, std::string(key.description) + " (" + allowed + ")"));
  }
}

Status CheckPlan(const std::string& key, const std::string& name, const Given& value) {
  const auto presets = PresetNames();
  if (!IsPlanName(name) || std::find(presets.begin(), presets.end(), name) != presets.end()) {
    return InvalidArgument("CONFIG_KEY",
                           value.where + ": plan name '" + name +
                               "'; allowed: 1 to 64 of a-z 0-9 _ -, and no preset's name");
  }
  const Result<Plan> plan = ParsePlan(value.value);
  if (plan.ok()) return OkStatus();
  return {plan.status().code(), plan.status().reason(),
          value.where + ": " + key + " = '" + value.value + "': " + plan.status().message()};
}

void ApplyPlans(const GivenByKey& given, Config* c, Mistakes* mistakes) {
  for (const auto& [key, value] : given) {
    if (!IsPlanKey(key)) continue;
    const std::string name = key.substr(kPlanPrefix.size());
    if (const Status status = CheckPlan(key, name, value); !status.ok()) {
      mistakes->push_back(status);
      continue;
    }
    c->store.named_plans.emplace_back(name, value.value);
    c->entries.push_back(EntryOf(key, value, "named plan"));
  }
}

void ApplyUsers(const GivenByKey& given, Config* c, Mistakes* mistakes) {
  for (const auto& [key, value] : given) {
    const bool limit = IsUserLimitKey(key);
    if (!limit && !IsTenantKey(key)) continue;
    const Status status = limit ? ApplyUserLimit(key, value.value, value.where, c)
                                : ApplyTenantKey(key, value.value, value.where, c);
    Note(status, mistakes);
    if (!status.ok()) continue;
    c->entries.push_back(
        EntryOf(key, value, limit ? "limit of one user" : "one user in the remote tier"));
  }
}

// What no key sees alone.
void CheckTogether(const GivenByKey& given, Config* config, Mistakes* mistakes) {
  const Config& c = *config;
  const auto low = given.find("pool.low_percent");
  if (low != given.end() && c.store.low_percent > c.store.high_percent) {
    mistakes->push_back(
        WrongValue(low->first, low->second,
                   "at most pool.high_percent, which is " + std::to_string(c.store.high_percent)));
  }
  if (!c.disk.directory.empty()) Note(Located(DiskTier::Check(c.disk), c), mistakes);
  Note(Located(CheckRemoteEngine(c.remote), c), mistakes);
  if (Result<HttpAddress> address = ParseHttpAddress(c.http_listen); address.ok()) {
    config->http = std::move(address).value();
  } else if (const auto found = given.find("http.listen"); IsHttpAddress(c.http_listen)) {
    mistakes->push_back({address.status().code(), address.status().reason(),
                         found->second.where + ": " + address.status().message()});
  }
  if (const Status status = CheckSocketPath(c.socket); !status.ok()) {
    const auto found = given.find("socket.path");
    mistakes->push_back(InvalidArgument(
        "CONFIG_VALUE",
        (found == given.end() ? "default" : found->second.where) + ": " + status.message()));
  }
}

}  // namespace

std::map<std::string, std::string> ReadEnvironment() {
  std::map<std::string, std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    const std::string_view name = text.substr(0, equals);
    if (equals == text.npos || (name.substr(0, 9) != "KVSTRATA_" && name != "XDG_RUNTIME_DIR")) {
      continue;
    }
    out.emplace(name, text.substr(equals + 1));
  }
  return out;
}

Result<std::pair<std::string, std::string>> ParseSetting(std::string_view text) {
  const size_t equals = text.find('=');
  if (equals == text.npos || equals == 0) {
    return InvalidArgument("CONFIG_VALUE", "--set '" + std::string(text) +
                                               "'; allowed: KEY=VALUE, such as "
                                               "pool.device_bytes=8GiB");
  }
  return std::pair<std::string, std::string>(text.substr(0, equals), text.substr(equals + 1));
}

LoadedConfig ReadConfig(const ConfigSources& sources) {
  LoadedConfig loaded;
  Config& config = loaded.config;
  config.sources = sources;
  GivenByKey given;
  const bool named = !sources.file.empty();
  ConfigFiles files =
      ReadConfigFiles(named ? sources.file : sources.default_file, named, &given, &loaded.mistakes);
  config.files = std::move(files.read);
  loaded.complete = files.complete;
  if (!loaded.complete) return loaded;
  AddEnvironment(sources, &given, &config.warnings);
  for (auto [key, value] : sources.flags) {
    std::erase(key, '"');  // as a file has a user's table: "uid:1000"
    Note(AddGiven(std::move(key), {value, "flag", "flag"}, &given), &loaded.mistakes);
  }
  const auto [path, mode] = DefaultSocket(sources);
  ApplyKeys(given, path, &config, &loaded.mistakes);
  ApplyPlans(given, &config, &loaded.mistakes);
  ApplyUsers(given, &config, &loaded.mistakes);
  CheckTogether(given, &config, &loaded.mistakes);
  if (given.count("socket.path") == 0) config.socket_directory = mode;
  return loaded;
}

namespace {

// Whether the message has the key, not only another one that begins or ends with it
// (remote.mooncake, remote.mooncake_python).
bool Names(std::string_view message, std::string_view key) {
  const auto in_word = [&message](size_t at) {
    return at < message.size() &&
           (std::isalnum(static_cast<unsigned char>(message[at])) != 0 || message[at] == '_');
  };
  for (size_t at = message.find(key); at != message.npos; at = message.find(key, at + 1)) {
    const size_t end = at + key.size();
    const bool goes_on = in_word(end) || (message.substr(end).starts_with('.') && in_word(end + 1));
    if (!goes_on && (at == 0 || !in_word(at - 1))) return true;
  }
  return false;
}

}  // namespace

Status Located(const Status& mistake, const Config& config) {
  std::string where;
  for (const ConfigEntry& entry : config.entries) {
    // "threads" and "backend" are words, too.
    const bool named =
        entry.key.find('.') != std::string::npos && Names(mistake.message(), entry.key);
    if (named && !entry.where.empty()) {
      where += (where.empty() ? "" : ", ") + entry.where;
    }
  }
  if (mistake.ok() || where.empty()) return mistake;
  return {mistake.code(), mistake.reason(), where + ": " + std::string(mistake.message())};
}

std::string OneLine(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      line += c;
    } else {
      line += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return line;
}

Status Joined(std::span<const Status> mistakes) {
  KVS_CHECK(!mistakes.empty());
  const Status& first = mistakes.front();
  std::string text = OneLine(first.message());
  for (const Status& mistake : mistakes.subspan(1)) {
    text += "\n" + std::string(mistake.reason()) + ": " + OneLine(mistake.message());
  }
  return {first.code(), first.reason(), text};
}

}  // namespace kvstrata
