// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/quantities.h"
#include "server/config/config_keys.h"

namespace kvstrata {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 20;

// The key with its table's name, where that is all but written (remote.tenant.uid:1000.name); "":
// it is no table's.
std::string InNearestTable(std::string_view key) {
  for (const std::string_view table : {"remote.tenants", "limits.users", "plans"}) {
    size_t end = key.find('.');
    for (auto words = std::ranges::count(table, '.'); words > 0 && end != key.npos; --words) {
      end = key.find('.', end + 1);
    }
    if (end == key.npos || EditDistance(key.substr(0, end), table) > table.size() / 5) continue;
    return std::string(table) + std::string(key.substr(end));
  }
  return "";
}

// The key whose last word is written as a table ([redis] for remote.redis); "": there is none.
std::string NamedLikeATable(std::string_view key) {
  const size_t point = key.find('.');
  if (point == key.npos) return "";
  const auto like = std::ranges::find_if(ConfigKeys(), [&](const ConfigKey& known) {
    return known.name.substr(known.name.rfind('.') + 1) == key.substr(0, point);
  });
  return like == ConfigKeys().end() ? "" : std::string(like->name);
}

Status UnknownKey(const std::string& key, const std::string& where) {
  std::string nearest = InNearestTable(key);
  if (nearest.empty()) nearest = NearestConfigKey(key);
  if (nearest.empty()) nearest = NamedLikeATable(key);
  std::string known;
  for (const ConfigKey& k : ConfigKeys())
    known += (known.empty() ? "" : ", ") + std::string(k.name);
  return InvalidArgument(
      "CONFIG_KEY",
      where + ": unknown key '" + key + "'" +
          (nearest.empty()
               ? "; known: " + known + ", plans.NAME, limits.users.USER, remote.tenants.USER"
               : "; did you mean '" + nearest + "'?"));
}

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
  Note(AddGiven(key, std::move(given), out), mistakes);
}

// The error, and what to do about it.
std::string Unreadable(int error) {
  return std::string(std::strerror(error)) + "; let this user (" + std::to_string(geteuid()) +
         ") read it and enter its folders: chown, chmod";
}

Result<std::string> ReadFile(const std::string& file) {
  const auto fail = [&file](std::string_view why, Code code) {
    return Status(code, "CONFIG_FILE", "cannot read '" + file + "': " + std::string(why));
  };
  const UniqueFd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd && errno == ENOENT) {
    return fail("No such file or directory; name another with --config", Code::kNotFound);
  }
  if (!fd) return fail(Unreadable(errno), Code::kPermissionDenied);
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
    if (n < 0) return fail(Unreadable(errno), Code::kPermissionDenied);
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

// The files of FILE's folder, sorted; those that an editor or a packager left (.a.toml, a.toml~)
// are none.
Result<std::vector<std::string>> FilesOfFolder(const std::string& file) {
  const std::filesystem::path folder = std::filesystem::path(file).parent_path() / kConfigFolder;
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    if (name.ends_with(".toml") && !name.starts_with('.')) files.push_back(at->path());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    const bool denied = error == std::errc::permission_denied;
    return Status(denied ? Code::kPermissionDenied : Code::kInvalidArgument, "CONFIG_FILE",
                  "cannot read '" + folder.string() +
                      "': " + (denied ? Unreadable(error.value()) : error.message()));
  }
  if (files.size() > kMostConfigFiles) {
    return InvalidArgument("CONFIG_FILE",
                           "'" + folder.string() + "' has " + std::to_string(files.size()) +
                               " files; allowed: at most " + std::to_string(kMostConfigFiles));
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

void Note(const Status& status, Mistakes* mistakes) {
  if (!status.ok()) mistakes->push_back(status);
}

bool IsPlanKey(std::string_view key) { return key.starts_with("plans."); }

Status AddGiven(std::string key, Given given, GivenByKey* out) {
  const bool table = IsPlanKey(key) || IsUserLimitKey(key) || IsTenantKey(key);
  if (!table && FindConfigKey(key) == nullptr) return UnknownKey(key, given.where);
  out->insert_or_assign(std::move(key), std::move(given));
  return OkStatus();
}

ConfigFiles ReadConfigFiles(const std::string& file, bool must_exist, GivenByKey* out,
                            Mistakes* mistakes) {
  ConfigFiles files;
  if (must_exist || access(file.c_str(), F_OK) == 0) files.read.push_back(file);
  if (auto more = FilesOfFolder(file); more.ok()) {
    files.read.insert(files.read.end(), more->begin(), more->end());
  } else {
    mistakes->push_back(more.status());
    files.complete = false;
  }
  for (const std::string& each : files.read) {
    const Status read = AddFile(each, out, mistakes);
    files.complete &= read.ok();
    Note(read, mistakes);
  }
  return files;
}

}  // namespace kvstrata
