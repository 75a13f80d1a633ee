#include "server/config.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/stat.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>

#include "base/check.h"
#include "kernels/backend.h"
#include "server/config_keys.h"
#include "server/config_limits.h"
#include "server/config_values.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 20;
constexpr std::string_view kPlanPrefix = "plans.";

// --- what was given ------------------------------------------------------------------------------

struct Given {
  std::string value;
  std::string_view origin = "default";
  std::string where;      // for messages: "--set", "FILE:3:1"
  bool is_string = true;  // false: a TOML number or boolean
};
using GivenByKey = std::map<std::string, Given>;

Status UnknownKey(const std::string& key, const std::string& where) {
  const std::string_view nearest = NearestConfigKey(key);
  std::string known;
  for (const ConfigKey& k : ConfigKeys())
    known += (known.empty() ? "" : ", ") + std::string(k.name);
  return InvalidArgument(
      "CONFIG_KEY", where + ": unknown key '" + key + "'" +
                        (nearest.empty() ? "; known: " + known + ", plans.NAME, limits.users.USER"
                                         : "; did you mean '" + std::string(nearest) + "'?"));
}

Status WrongValue(const std::string& key, const Given& given, std::string_view allowed) {
  return InvalidArgument("CONFIG_VALUE", given.where + ": " + key + " = '" + given.value +
                                             "'; allowed: " + std::string(allowed));
}

bool IsPlanName(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == name.npos;
}

bool IsPlanKey(std::string_view key) { return key.substr(0, kPlanPrefix.size()) == kPlanPrefix; }

Status Add(std::string key, Given given, GivenByKey* out) {
  const bool table = IsPlanKey(key) || IsUserLimitKey(key);
  if (!table && FindConfigKey(key) == nullptr) return UnknownKey(key, given.where);
  out->insert_or_assign(std::move(key), std::move(given));
  return OkStatus();
}

// --- the file ------------------------------------------------------------------------------------

std::string TomlText(const toml::node& node) {
  std::ostringstream out;
  node.visit([&out](const auto& value) { out << value; });
  return out.str();
}

// A plan's table as the text form: `preset = "quest"` and options, or the axes alone.
std::string PlanText(const toml::table& table) {
  std::string preset, options;
  for (const auto& [key, node] : table) {
    if (key.str() == "preset" && node.is_string()) {
      preset = node.as_string()->get();
    } else {
      options += (options.empty() ? "" : ", ") + std::string(key.str()) + " = " + TomlText(node);
    }
  }
  return options.empty() && !preset.empty() ? preset : preset + "{" + options + "}";
}

using Mistakes = std::vector<Status>;

void Note(const Status& status, Mistakes* mistakes) {
  if (!status.ok()) mistakes->push_back(status);
}

void AddNode(const std::string& key, const toml::node& node, const std::string& file,
             GivenByKey* out, Mistakes* mistakes);

void AddTable(const std::string& prefix, const toml::table& table, const std::string& file,
              GivenByKey* out, Mistakes* mistakes) {
  for (const auto& [key, node] : table) {
    AddNode(prefix + std::string(key.str()), node, file, out, mistakes);
  }
}

void AddNode(const std::string& key, const toml::node& node, const std::string& file,
             GivenByKey* out, Mistakes* mistakes) {
  Given given;
  given.origin = "file";
  const toml::source_position at = node.source().begin;
  given.where = file + ":" + std::to_string(at.line) + ":" + std::to_string(at.column);
  if (const toml::table* table = node.as_table()) {
    if (!IsPlanKey(key)) return AddTable(key + ".", *table, file, out, mistakes);
    given.value = PlanText(*table);
  } else if (const auto* text = node.as_string()) {
    given.value = text->get();
  } else {
    given.value = TomlText(node);
    given.is_string = false;
  }
  Note(Add(key, std::move(given), out), mistakes);
}

Result<std::string> ReadFile(const std::string& file) {
  const auto fail = [&file](std::string_view why, Code code) {
    return Status(code, "CONFIG_FILE", "cannot read '" + file + "': " + std::string(why));
  };
  const UniqueFd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    return fail(std::strerror(errno), errno == ENOENT ? Code::kNotFound : Code::kPermissionDenied);
  }
  struct stat st {};
  if (fstat(fd.get(), &st) != 0 || !S_ISREG(st.st_mode)) {
    return fail("not a regular file", Code::kInvalidArgument);
  }
  if (static_cast<uint64_t>(st.st_size) > kMaxFileBytes) {
    return fail("larger than 1 MiB", Code::kInvalidArgument);
  }
  std::string text(static_cast<size_t>(st.st_size), '\0');
  size_t filled = 0;
  for (ssize_t n = 1; n > 0 && filled < text.size(); filled += n) {
    n = pread(fd.get(), text.data() + filled, text.size() - filled, static_cast<off_t>(filled));
    if (n < 0) return fail(std::strerror(errno), Code::kPermissionDenied);
  }
  text.resize(filled);
  return text;
}

// Puts the value of `key = 512MiB`, a size, duration or share, in quotes, as TOML wants text. What
// the line is then; nothing: it has no such value.
std::optional<std::string> QuoteValue(size_t line, std::string* text) {
  size_t begin = 0;
  for (size_t n = 1; n < line && begin != text->npos; ++n) begin = text->find('\n', begin) + 1;
  const size_t end = std::min(text->find('\n', begin), text->size());
  const std::string_view all = std::string_view(*text).substr(begin, end - begin);
  const size_t equals = all.find('=');
  if (equals == all.npos) return std::nullopt;
  const size_t first = all.find_first_not_of(" \t", equals + 1);
  const size_t last = all.find_last_not_of(" \t\r", std::min(all.find('#'), all.size()) - 1);
  if (first == all.npos || last < first) return std::nullopt;
  const std::string value(all.substr(first, last + 1 - first));
  uint64_t number = 0;
  std::chrono::microseconds duration{};
  const bool share = value.back() == '%' && ParseNumber(value.substr(0, value.size() - 1), &number);
  if (!share && !ParseSize(value, &number) && !ParseDuration(value, &duration)) {
    return std::nullopt;
  }
  text->replace(begin + first, value.size(), "\"" + value + "\"");
  return text->substr(begin, last + 3);
}

// An error: nothing of it could be read. A value that only lacks its quotes is a mistake of many.
Status AddFile(const std::string& file, GivenByKey* out, Mistakes* mistakes) {
  KVS_ASSIGN_OR_RETURN(std::string text, ReadFile(file));
  for (;;) {
    try {
      AddTable("", toml::parse(text, file), file, out, mistakes);
      return OkStatus();
    } catch (const toml::parse_error& error) {
      const toml::source_position at = error.source().begin;
      const std::string where =
          file + ":" + std::to_string(at.line) + ":" + std::to_string(at.column) + ": ";
      const std::optional<std::string> quoted = QuoteValue(at.line, &text);
      if (!quoted) {
        return InvalidArgument("CONFIG_SYNTAX", where + std::string(error.description()));
      }
      mistakes->push_back(InvalidArgument(
          "CONFIG_SYNTAX",
          where + "sizes, durations and shares are text, in quotes; write: " + *quoted));
    }
  }
}

// --- environment and defaults --------------------------------------------------------------------

void AddEnvironment(const std::map<std::string, std::string>& environment, GivenByKey* out,
                    std::vector<std::string>* warnings) {
  for (const auto& [name, value] : environment) {
    const auto key = std::ranges::find(ConfigKeys(), name, &ConfigKey::environment);
    if (key != ConfigKeys().end()) {
      if (!value.empty()) (*out)[std::string(key->name)] = {value, "environment", name};
      continue;
    }
    // Clients have variables of their own: only what nearly is a key is worth a word.
    for (const ConfigKey& k : ConfigKeys()) {
      if (EditDistance(name, k.environment) <= 2) {
        warnings->push_back("environment variable " + name + " is not a key; did you mean " +
                            std::string(k.environment) + "?");
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
    c->entries.push_back({name, value.value, std::string(value.origin),
                          std::string(key.description) + " (" + allowed + ")"});
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
    c->entries.push_back({key, value.value, std::string(value.origin), "named plan"});
  }
}

void ApplyUserLimits(const GivenByKey& given, Config* c, Mistakes* mistakes) {
  for (const auto& [key, value] : given) {
    if (!IsUserLimitKey(key)) continue;
    const Status status = ApplyUserLimit(key, value.value, value.where, c);
    Note(status, mistakes);
    if (!status.ok()) continue;
    c->entries.push_back({key, value.value, std::string(value.origin), "limit of one user"});
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
  if (!c.disk.directory.empty()) Note(DiskTier::Check(c.disk), mistakes);
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
  GivenByKey given;
  config.file = sources.file;
  if (config.file.empty() && access(sources.default_file.c_str(), F_OK) == 0) {
    config.file = sources.default_file;
  }
  if (!config.file.empty()) {
    const Status read = AddFile(config.file, &given, &loaded.mistakes);
    loaded.complete = read.ok();
    Note(read, &loaded.mistakes);
  }
  if (!loaded.complete) return loaded;
  AddEnvironment(sources.environment, &given, &config.warnings);
  for (const auto& [key, value] : sources.flags) {
    Note(Add(key, {value, "flag", "flag"}, &given), &loaded.mistakes);
  }
  const auto [path, mode] = DefaultSocket(sources);
  ApplyKeys(given, path, &config, &loaded.mistakes);
  ApplyPlans(given, &config, &loaded.mistakes);
  ApplyUserLimits(given, &config, &loaded.mistakes);
  CheckTogether(given, &config, &loaded.mistakes);
  if (given.count("socket.path") == 0) config.socket_directory = mode;
  return loaded;
}

Status Joined(std::span<const Status> mistakes) {
  KVS_CHECK(!mistakes.empty());
  const Status& first = mistakes.front();
  std::string text(first.message());
  for (const Status& mistake : mistakes.subspan(1)) text += "\n" + mistake.ToString();
  return {first.code(), first.reason(), text};
}

Result<Config> LoadConfig(const ConfigSources& sources) {
  LoadedConfig loaded = ReadConfig(sources);
  if (!loaded.mistakes.empty()) return Joined(loaded.mistakes);
  return std::move(loaded.config);
}

}  // namespace kvstrata
