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

#include "kernels/backend.h"
#include "server/attach/unix_listener.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB,
                   kPiB = 1024 * kTiB;
constexpr uint64_t kMaxFileBytes = kMiB;
constexpr std::string_view kPlanPrefix = "plans.";

// --- values --------------------------------------------------------------------------------------

bool ParseNumber(std::string_view text, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

// Splits "512 MiB" into its digits and its unit.
std::pair<std::string_view, std::string_view> SplitUnit(std::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  std::string_view unit = text.substr(digits);
  if (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return {text.substr(0, digits), unit};
}

template <typename T>
bool NumberIn(std::string_view text, uint64_t low, uint64_t high, T* out) {
  uint64_t n = 0;
  if (!ParseNumber(text, &n) || n < low || n > high) return false;
  *out = static_cast<T>(n);
  return true;
}

bool SizeIn(std::string_view text, uint64_t low, uint64_t high, uint64_t* out) {
  uint64_t n = 0;
  if (!ParseSize(text, &n) || n < low || n > high) return false;
  *out = n;
  return true;
}

bool DurationIn(std::string_view text, microseconds low, microseconds high, microseconds* out) {
  microseconds n{};
  if (!ParseDuration(text, &n) || n < low || n > high) return false;
  *out = n;
  return true;
}

bool GroupOf(std::string_view text, int64_t* gid) {
  if (text.empty()) return true;
  if (NumberIn(text, 0, 0xFFFFFFFE, gid)) return true;
  group entry{}, *found = nullptr;
  std::array<char, 16384> buffer;
  const std::string name(text);
  if (getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 ||
      found == nullptr) {
    return false;
  }
  *gid = found->gr_gid;
  return true;
}

bool ArenaBytes(std::string_view v, uint64_t* out) {
  uint64_t n = 0;
  if (!SizeIn(v, 0, kGiB, &n) || (n != 0 && (n < 64 * kKiB || n % (4 * kKiB) != 0))) return false;
  *out = n;
  return true;
}

// "0-3,6": ranges and single numbers.
bool CpuList(std::string_view text, std::vector<int>* out) {
  std::vector<int> cpus;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, comma);
    const size_t dash = std::min(item.find('-'), item.size());
    int first = 0, last = 0;
    if (!NumberIn(item.substr(0, dash), 0, 1023, &first)) return false;
    last = first;
    if (dash < item.size() && !NumberIn(item.substr(dash + 1), 0, 1023, &last)) return false;
    if (last < first) return false;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (comma + 1 == text.size()) return false;
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  *out = std::move(cpus);
  return true;
}

bool Level(std::string_view v, LogLevel* out) {
  constexpr std::array<std::string_view, 5> names = {"trace", "debug", "info", "warn", "error"};
  const auto at = std::find(names.begin(), names.end(), v);
  *out = static_cast<LogLevel>(at - names.begin());
  return at != names.end();
}

std::string BackendNames() {
  std::string names;
  for (const Backend& b : Backends()) {
    names += (names.empty() ? "" : ", ") + std::string(b.name);
  }
  return names;
}

// --- keys ----------------------------------------------------------------------------------------

bool ParseUuids(std::string_view text, std::vector<std::string>* uuids) {
  constexpr size_t kUuid = 40;
  for (;;) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string uuid(text.substr(0, comma));
    const bool another = std::ranges::find(*uuids, uuid) == uuids->end();
    if (!uuid.starts_with("GPU-") || uuid.size() != kUuid || !another) return false;
    uuids->push_back(uuid);
    if (uuids->size() > PoolId::kMaxDevices) return false;
    if (comma == text.size()) return true;
    text.remove_prefix(comma + 1);
  }
}

bool ParseDevices(std::string_view text, PoolDevices* devices) {
  constexpr std::string_view kEmulated = "emulated";
  *devices = PoolDevices();
  if (text == kEmulated) return true;
  if (text.starts_with(kEmulated) && text.substr(kEmulated.size()).starts_with(':')) {
    return NumberIn(text.substr(kEmulated.size() + 1), 1, PoolId::kMaxDevices, &devices->emulated);
  }
  devices->emulated = 0;
  return text == "cuda" || ParseUuids(text, &devices->uuids);
}

struct Key {
  std::string_view name, environment, fallback, allowed, description;
  bool (*apply)(std::string_view value, Config* c);  // false: not allowed
  bool text = false;                                 // in a file it must be a string
};

// Empty fallbacks are filled in by LoadConfig. docs/configuration.md mirrors this table.
constexpr std::array kKeys = {
    Key{"socket.path", "KVSTRATA_SOCKET", "", "a path of at most 100 bytes",
        "gRPC socket; PATH.attach beside it passes descriptors",
        [](std::string_view v, Config* c) {
          c->socket = v;
          return true;
        },
        true},
    Key{"socket.group", "KVSTRATA_SOCKET_GROUP", "", "a group's name or number; '': the daemon's",
        "group that may connect (the sockets have mode 0660)",
        [](std::string_view v, Config* c) { return GroupOf(v, &c->socket_group); }},
    Key{"pool.device", "KVSTRATA_POOL_DEVICE", "emulated",
        "emulated, emulated:N (N up to 64), cuda, or GPU-UUID[,GPU-UUID...]",
        "memory of the device pools, one each: the host's, every visible GPU's, or those GPUs'",
        [](std::string_view v, Config* c) {
          c->device = v;
          return ParseDevices(v, &c->devices);
        },
        true},
    Key{"pool.device_bytes", "KVSTRATA_POOL_DEVICE_BYTES", "4GiB", "a size, 1MiB to 16TiB",
        "capacity of each device pool; of a GPU at most what is free when the daemon starts",
        [](std::string_view v, Config* c) {
          return SizeIn(v, kMiB, 16 * kTiB, &c->store.device_bytes);
        }},
    Key{"pool.host_bytes", "KVSTRATA_POOL_HOST_BYTES", "4GiB", "a size, 1MiB to 16TiB",
        "capacity of the host pool",
        [](std::string_view v, Config* c) {
          return SizeIn(v, kMiB, 16 * kTiB, &c->store.host_bytes);
        }},
    Key{"pool.host_numa", "KVSTRATA_POOL_HOST_NUMA", "auto",
        "auto, interleave, or the number of a NUMA node, 0 to 1023",
        "where the host pool's memory lies: near the GPU, on all nodes by turns, or on one node",
        [](std::string_view v, Config* c) {
          const std::optional<HostNuma> numa = ParseHostNuma(v);
          if (numa) c->host_numa = *numa;
          return numa.has_value();
        }},
    Key{"pool.arena_bytes", "KVSTRATA_POOL_ARENA_BYTES", "0",
        "a size, 64KiB to 1GiB and a multiple of 4KiB; 0: capacity / 64 within 16MiB .. 256MiB",
        "size of one arena (memfd); a session takes whole arenas",
        [](std::string_view v, Config* c) { return ArenaBytes(v, &c->store.arena_bytes); }},
    Key{"pool.high_percent", "KVSTRATA_POOL_HIGH_PERCENT", "90", "1 to 100; 100: never",
        "of a pool's capacity: above it, pages that nobody uses are moved away in the background",
        [](std::string_view v, Config* c) { return NumberIn(v, 1, 100, &c->store.high_percent); }},
    Key{"pool.low_percent", "KVSTRATA_POOL_LOW_PERCENT", "80", "1 to 100",
        "of a pool's capacity: until it is down to this; at most pool.high_percent counts",
        [](std::string_view v, Config* c) { return NumberIn(v, 1, 100, &c->store.low_percent); }},
    Key{"move.bytes_per_second", "KVSTRATA_MOVE_BYTES_PER_SECOND", "2GiB",
        "a size, 1MiB to 1PiB; 0: as fast as it goes",
        "what is copied in the background, between device and host, in a second",
        [](std::string_view v, Config* c) {
          return SizeIn(v, 0, kPiB, &c->mover.bytes_per_second) &&
                 (c->mover.bytes_per_second == 0 || c->mover.bytes_per_second >= kMiB);
        }},
    Key{"move.promote_rate", "KVSTRATA_MOVE_PROMOTE_RATE", "32GB",
        "a size, 64MiB to 16TiB; 0: no limit",
        "bytes a second that moves copy from host to device while a step runs",
        [](std::string_view v, Config* c) {
          return SizeIn(v, 0, 16 * kTiB, &c->store.promote_rate) &&
                 (c->store.promote_rate == 0 || c->store.promote_rate >= 64 * kMiB);
        }},
    Key{"pin.limit_bytes", "KVSTRATA_PIN_LIMIT_BYTES", "0",
        "a size, 0 to 1PiB; 0: half of both pools", "bytes of all pinned prefixes together",
        [](std::string_view v, Config* c) {
          return SizeIn(v, 0, kPiB, &c->store.pin_limit_bytes);
        }},
    Key{"session.max", "KVSTRATA_SESSION_MAX", "1024", "1 to 65536",
        "sessions at the same time, both roads together",
        [](std::string_view v, Config* c) {
          return NumberIn(v, 1, 65536, &c->store.max_sessions);
        }},
    Key{"session.headroom_tokens", "KVSTRATA_SESSION_HEADROOM_TOKENS", "64", "1 to 65536",
        "tokens of pages kept ahead of what is committed",
        [](std::string_view v, Config* c) {
          return NumberIn(v, 1, 65536, &c->store.headroom_tokens);
        }},
    Key{"attach.hello_timeout", "KVSTRATA_ATTACH_HELLO_TIMEOUT", "2s", "a duration, 10ms to 60s",
        "how long a new connection may take to say Hello",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(10'000), microseconds(60'000'000),
                            &c->attach.hello_timeout);
        }},
    Key{"attach.poll", "KVSTRATA_ATTACH_POLL", "50us", "a duration, 0 to 10ms",
        "how long the rings are polled after activity before the daemon sleeps",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(0), microseconds(10'000), &c->attach.poll);
        }},
    Key{"attach.reply_backlog_bytes", "KVSTRATA_ATTACH_REPLY_BACKLOG_BYTES", "1MiB",
        "a size, 4KiB to 64MiB", "replies of one session that may wait beyond its reply ring",
        [](std::string_view v, Config* c) {
          return SizeIn(v, 4 * kKiB, 64 * kMiB, &c->attach.reply_backlog_bytes);
        }},
    Key{"backend", "KVSTRATA_BACKEND", "", "a backend of this build",
        "implementation of the ops, for the remote road and for clients that do not choose",
        [](std::string_view v, Config* c) {
          c->backend = v;
          c->attach.backend = v;
          return !v.empty() && FindBackend(v).ok();
        },
        true},
    Key{"threads", "KVSTRATA_THREADS", "0", "0 to 1024; 0: all cores",
        "threads of the remote road's ops",
        [](std::string_view v, Config* c) { return NumberIn(v, 0, 1024, &c->threads); }},
    Key{"work.threads", "KVSTRATA_WORK_THREADS", "1", "0 to 256; 0: rows are never recompressed",
        "workers that recompress sequences whose plan has a codec, away from decode",
        [](std::string_view v, Config* c) { return NumberIn(v, 0, 256, &c->work.threads); }},
    Key{"work.op_threads", "KVSTRATA_WORK_OP_THREADS", "1", "1 to 256",
        "threads of one worker's ops",
        [](std::string_view v, Config* c) { return NumberIn(v, 1, 256, &c->work.op_threads); }},
    Key{"work.queue", "KVSTRATA_WORK_QUEUE", "1024", "1 to 1000000",
        "sequences that may wait for a worker; more are offered again when there is room",
        [](std::string_view v, Config* c) { return NumberIn(v, 1, 1'000'000, &c->work.queue); }},
    Key{"work.cpus", "KVSTRATA_WORK_CPUS", "", "a list such as 0-3,6; '': all",
        "cores that workers and their ops may run on",
        [](std::string_view v, Config* c) { return CpuList(v, &c->work.cpus); }},
    Key{"disk.path", "KVSTRATA_DISK_PATH", "", "a directory's absolute path; '': no disk tier",
        "where pages and artefacts are kept across restarts; made with mode 0700 if its parent "
        "exists",
        [](std::string_view v, Config* c) {
          c->disk.directory = v;
          return v.empty() || v.front() == '/';
        },
        true},
    Key{"disk.budget_bytes", "KVSTRATA_DISK_BUDGET_BYTES", "16GiB",
        "a size that holds a segment and two checkpoints, at most 8190 segments",
        "bytes of all files of the disk tier, reserved at the start",
        [](std::string_view v, Config* c) { return SizeIn(v, 0, kPiB, &c->disk.budget_bytes); }},
    Key{"disk.segment_bytes", "KVSTRATA_DISK_SEGMENT_BYTES", "256MiB",
        "a size, 64KiB to 4GiB and a multiple of 4KiB",
        "size of one file; a page with all its layers must fit; never changes for a directory",
        [](std::string_view v, Config* c) {
          return SizeIn(v, 64 * kKiB, 4 * kGiB, &c->disk.segment_bytes) &&
                 c->disk.segment_bytes % (4 * kKiB) == 0;
        }},
    Key{"disk.start_timeout", "KVSTRATA_DISK_START_TIMEOUT", "60s", "a duration, 100ms to 60min",
        "how long the disk tier's index may take at the start; then the start fails",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(100'000), microseconds(3'600'000'000),
                            &c->disk_start_timeout);
        }},
    Key{"disk.queue", "KVSTRATA_DISK_QUEUE", "65536", "1 to 10000000",
        "pages and artefacts that may wait to be written; more are not written",
        [](std::string_view v, Config* c) {
          return NumberIn(v, 1, 10'000'000, &c->disk_pages.queue);
        }},
    Key{"disk.readers", "KVSTRATA_DISK_READERS", "2", "1 to 16",
        "threads that read pages of opening sequences from disk, by turns",
        [](std::string_view v, Config* c) { return NumberIn(v, 1, 16, &c->disk_pages.readers); }},
    Key{"disk.load_timeout", "KVSTRATA_DISK_LOAD_TIMEOUT", "500ms", "a duration, 1ms to 60s",
        "how long an opening sequence may wait for pages on disk; then its prefix ends there",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(1000), microseconds(60'000'000),
                            &c->disk_pages.load_timeout);
        }},
    Key{"disk.checkpoint_interval", "KVSTRATA_DISK_CHECKPOINT_INTERVAL", "60s",
        "0: at a clean stop only; else a duration up to 24h",
        "how often what was written to disk is made durable and its index saved",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(0), microseconds(86'400'000'000),
                            &c->disk_pages.checkpoint_interval);
        }},
    Key{"parameters.directory", "KVSTRATA_PARAMETERS_DIRECTORY", "",
        "a directory's absolute path; '': none",
        "where the files lie that plans name by `parameters` (SeKV, trained)",
        [](std::string_view v, Config* c) {
          c->store.parameters_directory = v;
          return v.empty() || v.front() == '/';
        },
        true},
    Key{"shutdown.timeout", "KVSTRATA_SHUTDOWN_TIMEOUT", "4s", "a duration, 100ms to 5s",
        "a shutdown that takes longer is cut short, with exit code 1",
        [](std::string_view v, Config* c) {
          return DurationIn(v, microseconds(100'000), microseconds(5'000'000),
                            &c->shutdown_timeout);
        }},
    Key{"log.level", "KVSTRATA_LOG_LEVEL", "info", "trace, debug, info, warn, error",
        "least severe events that are written",
        [](std::string_view v, Config* c) { return Level(v, &c->log_level); }, true},
    Key{"log.format", "KVSTRATA_LOG_FORMAT", "text", "text, json", "form of a line on stderr",
        [](std::string_view v, Config* c) {
          c->log_format = v == "json" ? LogFormat::kJson : LogFormat::kText;
          return v == "json" || v == "text";
        },
        true},
    Key{"debug.coredump", "KVSTRATA_DEBUG_COREDUMP", "false", "true, false",
        "allow core dumps and debuggers; a dump holds users' caches",
        [](std::string_view v, Config* c) {
          c->coredump = v == "true";
          return v == "true" || v == "false";
        }},
};

const Key* FindKey(std::string_view name) {
  const auto at =
      std::find_if(kKeys.begin(), kKeys.end(), [name](const Key& k) { return k.name == name; });
  return at == kKeys.end() ? nullptr : &*at;
}

// Changes of one character that turn `a` into `b`.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({change, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row[b.size()];
}

// The nearest known key, also to one given without its section; "" if none is near.
std::string_view NearestKey(std::string_view name) {
  std::string_view best;
  size_t least = std::max<size_t>(2, name.size() / 4) + 1;
  for (const Key& key : kKeys) {
    const std::string_view bare = key.name.substr(key.name.rfind('.') + 1);
    const size_t distance =
        std::min(Distance(name, key.name), Distance(name.substr(name.rfind('.') + 1), bare));
    if (distance < least) {
      least = distance;
      best = key.name;
    }
  }
  return best;
}

// --- what was given ------------------------------------------------------------------------------

struct Given {
  std::string value;
  std::string_view origin = "default";
  std::string where;      // for messages: "--set", "FILE:3:1"
  bool is_string = true;  // false: a TOML number or boolean
};
using GivenByKey = std::map<std::string, Given>;

Status UnknownKey(const std::string& key, const std::string& where) {
  const std::string_view nearest = NearestKey(key);
  std::string known;
  for (const Key& k : kKeys) known += (known.empty() ? "" : ", ") + std::string(k.name);
  return InvalidArgument("CONFIG_KEY",
                         where + ": unknown key '" + key + "'" +
                             (nearest.empty() ? "; known: " + known + ", plans.NAME"
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
  if (!IsPlanKey(key) && FindKey(key) == nullptr) return UnknownKey(key, given.where);
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

Status AddNode(const std::string& key, const toml::node& node, const std::string& file,
               GivenByKey* out);

Status AddTable(const std::string& prefix, const toml::table& table, const std::string& file,
                GivenByKey* out) {
  for (const auto& [key, node] : table) {
    KVS_RETURN_IF_ERROR(AddNode(prefix + std::string(key.str()), node, file, out));
  }
  return OkStatus();
}

Status AddNode(const std::string& key, const toml::node& node, const std::string& file,
               GivenByKey* out) {
  Given given;
  given.origin = "file";
  const toml::source_position at = node.source().begin;
  given.where = file + ":" + std::to_string(at.line) + ":" + std::to_string(at.column);
  if (const toml::table* table = node.as_table()) {
    if (!IsPlanKey(key)) return AddTable(key + ".", *table, file, out);
    given.value = PlanText(*table);
  } else if (const auto* text = node.as_string()) {
    given.value = text->get();
  } else {
    given.value = TomlText(node);
    given.is_string = false;
  }
  return Add(key, std::move(given), out);
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

Status AddFile(const std::string& file, GivenByKey* out) {
  KVS_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  try {
    return AddTable("", toml::parse(text, file), file, out);
  } catch (const toml::parse_error& error) {
    const toml::source_position at = error.source().begin;
    return InvalidArgument("CONFIG_SYNTAX", file + ":" + std::to_string(at.line) + ":" +
                                                std::to_string(at.column) + ": " +
                                                std::string(error.description()));
  }
}

// --- environment and defaults --------------------------------------------------------------------

void AddEnvironment(const std::map<std::string, std::string>& environment, GivenByKey* out,
                    std::vector<std::string>* warnings) {
  for (const auto& [name, value] : environment) {
    const auto key = std::find_if(kKeys.begin(), kKeys.end(),
                                  [&](const Key& k) { return k.environment == name; });
    if (key != kKeys.end()) {
      if (!value.empty()) (*out)[std::string(key->name)] = {value, "environment", name};
      continue;
    }
    // Clients have variables of their own: only what nearly is a key is worth a word.
    for (const Key& k : kKeys) {
      if (Distance(name, k.environment) <= 2) {
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

std::string FallbackOf(const Key& key, const std::string& default_socket) {
  if (key.name == "socket.path") return default_socket;
  if (key.name == "backend") return std::string(Backends().front().name);
  return std::string(key.fallback);
}

Status ApplyKeys(const GivenByKey& given, const std::string& default_socket, Config* c) {
  for (const Key& key : kKeys) {
    const std::string name(key.name);
    const auto found = given.find(name);
    const Given value = found != given.end()
                            ? found->second
                            : Given{FallbackOf(key, default_socket), "default", "default"};
    const std::string allowed = key.name == "backend" ? BackendNames() : std::string(key.allowed);
    if ((key.text && !value.is_string) || !key.apply(value.value, c)) {
      return WrongValue(name, value, allowed);
    }
    c->entries.push_back({name, value.value, std::string(value.origin),
                          std::string(key.description) + " (" + allowed + ")"});
  }
  return OkStatus();
}

Status ApplyPlans(const GivenByKey& given, Config* c) {
  for (const auto& [key, value] : given) {
    if (!IsPlanKey(key)) continue;
    const std::string name = key.substr(kPlanPrefix.size());
    const auto presets = PresetNames();
    if (!IsPlanName(name) || std::find(presets.begin(), presets.end(), name) != presets.end()) {
      return InvalidArgument("CONFIG_KEY",
                             value.where + ": plan name '" + name +
                                 "'; allowed: 1 to 64 of a-z 0-9 _ -, and no preset's name");
    }
    if (const Result<Plan> plan = ParsePlan(value.value); !plan.ok()) {
      return {plan.status().code(), plan.status().reason(),
              value.where + ": " + key + " = '" + value.value + "': " + plan.status().message()};
    }
    c->store.named_plans.emplace_back(name, value.value);
    c->entries.push_back({key, value.value, std::string(value.origin), "named plan"});
  }
  return OkStatus();
}

}  // namespace

bool ParseSize(std::string_view text, uint64_t* bytes) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 10> units = {{
      {"", 1},
      {"B", 1},
      {"KiB", kKiB},
      {"MiB", kMiB},
      {"GiB", kGiB},
      {"TiB", kTiB},
      {"KB", 1000},
      {"MB", 1000'000},
      {"GB", 1000'000'000},
      {"TB", 1000'000'000'000},
  }};
  const auto [digits, unit] = SplitUnit(text);
  const auto at = std::find_if(units.begin(), units.end(),
                               [u = unit](const auto& entry) { return entry.first == u; });
  uint64_t n = 0;
  if (at == units.end() || !ParseNumber(digits, &n)) return false;
  return !__builtin_mul_overflow(n, at->second, bytes);
}

bool ParseDuration(std::string_view text, microseconds* out) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 4> units = {{
      {"us", 1},
      {"ms", 1000},
      {"s", 1000'000},
      {"min", 60'000'000},
  }};
  const auto [digits, unit] = SplitUnit(text);
  uint64_t n = 0;
  if (!ParseNumber(digits, &n) || n > 1'000'000'000'000) return false;
  const auto at = std::find_if(units.begin(), units.end(),
                               [u = unit](const auto& entry) { return entry.first == u; });
  if (at == units.end() && !(unit.empty() && n == 0)) return false;
  *out = microseconds(at == units.end() ? 0 : n * at->second);
  return true;
}

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

Result<Config> LoadConfig(const ConfigSources& sources) {
  Config config;
  GivenByKey given;
  config.file = sources.file;
  if (config.file.empty() && access(sources.default_file.c_str(), F_OK) == 0) {
    config.file = sources.default_file;
  }
  if (!config.file.empty()) KVS_RETURN_IF_ERROR(AddFile(config.file, &given));
  AddEnvironment(sources.environment, &given, &config.warnings);
  for (const auto& [key, value] : sources.flags) {
    KVS_RETURN_IF_ERROR(Add(key, {value, "flag", "flag"}, &given));
  }
  const auto [path, mode] = DefaultSocket(sources);
  KVS_RETURN_IF_ERROR(ApplyKeys(given, path, &config));
  KVS_RETURN_IF_ERROR(ApplyPlans(given, &config));
  if (!config.disk.directory.empty()) KVS_RETURN_IF_ERROR(DiskTier::Check(config.disk));
  if (given.count("socket.path") == 0) config.socket_directory = mode;
  if (const Status status = CheckSocketPath(config.socket); !status.ok()) {
    const auto found = given.find("socket.path");
    return InvalidArgument(
        "CONFIG_VALUE",
        (found == given.end() ? "default" : found->second.where) + ": " + status.message());
  }
  return config;
}

}  // namespace kvstrata
