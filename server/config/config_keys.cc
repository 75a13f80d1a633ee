// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_keys.h"

#include <grp.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include "kernels/backend/backend.h"
#include "server/config/config_files.h"
#include "server/config/config_numbers.h"
#include "server/http/trace_exporter.h"
#include "server/sockets/unix_listener.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

bool Text(std::string_view v, std::string* out) {
  *out = v;
  return true;
}

// An absolute path; "": none.
bool Directory(std::string_view v, std::string* out) {
  return Text(v, out) && (v.empty() || v.front() == '/');
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

bool ChunkBytes(std::string_view v, uint64_t* out) {
  uint64_t n = 0;
  if (!SizeIn(v, 0, 8 * kTiB, &n) || (n != 0 && (n < 4 * kMiB || n % (4 * kKiB) != 0))) {
    return false;
  }
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

constexpr std::array kDaemonKeys = {
    ConfigKey{"socket.path", "", "a path of at most 100 bytes",
              "gRPC socket; PATH.attach beside it passes descriptors",
              KVS_READS(Text(v, &c->socket)), kText},
    ConfigKey{"socket.group", "", "a group's name or number; '': the daemon's",
              "group that may connect (the sockets have mode 0660)",
              KVS_READS(GroupOf(v, &c->socket_group))},
    ConfigKey{
        "pool.device", "emulated",
        "emulated, emulated:N (N up to 64), cuda, or GPU-UUID[,GPU-UUID...]",
        "memory of the device pools, one each: the host's, every visible GPU's, or those GPUs'",
        KVS_READS(Text(v, &c->device) && ParseDevices(v, &c->devices)), kText},
    ConfigKey{"pool.device_bytes", "4GiB", "a size, 1MiB to 16TiB",
              "capacity of each device pool; of a GPU at most what is free when the daemon starts",
              KVS_READS(SizeIn(v, kMiB, 16 * kTiB, &c->store.device_bytes))},
    ConfigKey{"pool.host_bytes", "4GiB", "a size, 1MiB to 16TiB", "capacity of the host pool",
              KVS_READS(SizeIn(v, kMiB, 16 * kTiB, &c->store.host_bytes))},
    ConfigKey{
        "pool.host_numa", "auto", "auto, interleave, or the number of a NUMA node, 0 to 1023",
        "where the host pool's memory lies: near the GPU, round robin on all nodes, or on one node",
        [](std::string_view v, Config* c) {
          const std::optional<HostNuma> numa = ParseHostNuma(v);
          if (numa) c->host_numa = *numa;
          return numa.has_value();
        }},
    ConfigKey{
        "pool.arena_bytes", "0",
        "a size, 64KiB to 1GiB and a multiple of 4KiB; 0: capacity / 64 within 16MiB .. 256MiB",
        "size of one arena (memfd); a session takes whole arenas",
        KVS_READS(ArenaBytes(v, &c->store.arena_bytes))},
    ConfigKey{
        "pool.high_percent", "90", "1 to 100; 100: never",
        "of a pool's capacity: above it, pages that nobody uses are moved away in the background",
        KVS_READS(NumberIn(v, 1, 100, &c->store.high_percent)), kAny, kReloads},
    ConfigKey{"pool.low_percent", "80", "1 to 100",
              "of a pool's capacity: until it is down to this; at most pool.high_percent",
              KVS_READS(NumberIn(v, 1, 100, &c->store.low_percent)), kAny, kReloads},
    ConfigKey{"move.bytes_per_second", "2GiB", "a size, 1MiB to 1PiB; 0: as fast as it goes",
              "what is copied in the background, between device and host, in a second",
              KVS_READS(SizeIn(v, 0, kPiB, &c->mover.bytes_per_second) &&
                        (c->mover.bytes_per_second == 0 || c->mover.bytes_per_second >= kMiB)),
              kAny, kReloads},
    ConfigKey{"move.promote_rate", "32GB", "a size, 64MiB to 16TiB; 0: no limit",
              "bytes a second that moves copy from host to device while a step runs",
              KVS_READS(SizeIn(v, 0, 16 * kTiB, &c->store.promote_rate) &&
                        (c->store.promote_rate == 0 || c->store.promote_rate >= 64 * kMiB)),
              kAny, kReloads},
    ConfigKey{"pin.limit_bytes", "0", "a size, 0 to 1PiB; 0: half of both pools",
              "bytes of all pinned prefixes together",
              KVS_READS(SizeIn(v, 0, kPiB, &c->store.pin_limit_bytes)), kAny, kReloads},
    ConfigKey{"session.max", "1024", "1 to 65536",
              "sessions at the same time, both transports together; from 64 on the last 16 are "
              "operators'",
              KVS_READS(NumberIn(v, 1, 65536, &c->store.max_sessions)), kAny, kReloads},
    ConfigKey{"session.headroom_tokens", "64", "1 to 65536",
              "tokens of pages kept ahead of what is committed",
              KVS_READS(NumberIn(v, 1, 65536, &c->store.headroom_tokens))},
    ConfigKey{"attach.hello_timeout", "2s", "a duration, 10ms to 60s",
              "how long a new connection may take to say Hello",
              KVS_READS(DurationIn(v, microseconds(10'000), microseconds(60'000'000),
                                   &c->attach.hello_timeout)),
              kAny, kReloads},
    ConfigKey{
        "health.patience", "2s", "a duration, 100ms to 600s",
        "how long a loop that serves clients may take for one iteration until health says so; "
        "loops that copy, write or compute have 15 to 150 times as long",
        KVS_READS(DurationIn(v, microseconds(100'000), microseconds(600'000'000), &c->patience)),
        kAny, kReloads},
    ConfigKey{"attach.poll", "50us", "a duration, 0 to 10ms",
              "how long the rings are polled after activity before the daemon sleeps",
              KVS_READS(DurationIn(v, microseconds(0), microseconds(10'000), &c->attach.poll))},
    ConfigKey{"attach.reply_backlog_bytes", "1MiB", "a size, 4KiB to 64MiB",
              "replies of one session that may wait beyond its reply ring",
              KVS_READS(SizeIn(v, 4 * kKiB, 64 * kMiB, &c->attach.reply_backlog_bytes))},
    ConfigKey{"chunks.bytes", "8GiB",
              "a size, 4MiB to 8TiB and a multiple of 4KiB; 0: none are kept",
              "memory for engines' chunks, taken when the first engine comes to PATH.chunks",
              KVS_READS(ChunkBytes(v, &c->chunk_bytes))},
    ConfigKey{"chunks.layout_percent", "100", "1 to 100",
              "of chunks.bytes, what chunks of one size may take, which engines of one layout have",
              KVS_READS(NumberIn(v, 1, 100, &c->chunk_layout_percent))},
    ConfigKey{
        "backend", "", "a backend of this build",
        "implementation of the ops, for the remote transport and for clients that do not choose",
        KVS_READS(!v.empty() && Text(v, &c->backend) && Text(v, &c->attach.backend) &&
                  FindBackend(v).ok()),
        kText},
    ConfigKey{"threads", "0", "0 to 1024; 0: all cores", "threads of the remote transport's ops",
              KVS_READS(NumberIn(v, 0, 1024, &c->threads))},
    ConfigKey{"work.threads", "1", "0 to 256; 0: rows are never recompressed",
              "workers that recompress sequences whose plan has a codec, away from decode",
              KVS_READS(NumberIn(v, 0, 256, &c->work.threads))},
    ConfigKey{"work.op_threads", "1", "1 to 256", "threads of one worker's ops",
              KVS_READS(NumberIn(v, 1, 256, &c->work.op_threads))},
    ConfigKey{"work.queue", "1024", "1 to 1000000",
              "sequences that may wait for a worker; more are offered again when there is room",
              KVS_READS(NumberIn(v, 1, 1'000'000, &c->work.queue))},
    ConfigKey{"work.cpus", "", "a list such as 0-3,6; '': all",
              "cores that workers and their ops may run on", KVS_READS(CpuList(v, &c->work.cpus))},
    ConfigKey{
        "disk.path", "", "a directory's absolute path; '': no disk tier",
        "where pages and artefacts are kept across restarts; made with mode 0700 if its parent "
        "exists",
        KVS_READS(Directory(v, &c->disk.directory)), kText},
    ConfigKey{"disk.budget_bytes", "16GiB",
              "a size that holds a segment and two checkpoints, at most 8190 segments",
              "bytes of all files of the disk tier, reserved at the start",
              KVS_READS(SizeIn(v, 0, kPiB, &c->disk.budget_bytes))},
    ConfigKey{
        "disk.segment_bytes", "256MiB", "a size, 64KiB to 4GiB and a multiple of 4KiB",
        "size of one file; a page with all its layers must fit; never changes for a directory",
        KVS_READS(SizeIn(v, 64 * kKiB, 4 * kGiB, &c->disk.segment_bytes) &&
                  c->disk.segment_bytes % (4 * kKiB) == 0)},
    ConfigKey{"disk.start_timeout", "60s", "a duration, 100ms to 60min",
              "how long the disk tier's index may take at the start; then the start fails",
              KVS_READS(DurationIn(v, microseconds(100'000), microseconds(3'600'000'000),
                                   &c->disk_start_timeout))},
    ConfigKey{"disk.queue", "65536", "1 to 10000000",
              "pages and artefacts that may wait to be written; more are not written",
              KVS_READS(NumberIn(v, 1, 10'000'000, &c->tier_pages.writer.queue))},
    ConfigKey{"disk.readers", "2", "1 to 16",
              "batches of pages read from disk for opening sequences at once, in rounds",
              KVS_READS(NumberIn(v, 1, 16, &c->tier_pages.loads.readers))},
    ConfigKey{"disk.load_timeout", "500ms", "a duration, 1ms to 60s",
              "how long an opening sequence may wait for pages on disk; then its prefix ends there",
              KVS_READS(DurationIn(v, microseconds(1000), microseconds(60'000'000),
                                   &c->tier_pages.loads.load_timeout)),
              kAny, kReloads},
    ConfigKey{"disk.checkpoint_interval", "60s",
              "0: at a clean stop only; else a duration up to 24h",
              "how often what was written to disk is made durable and its index saved",
              KVS_READS(DurationIn(v, microseconds(0), microseconds(86'400'000'000),
                                   &c->disk_values.checkpoint_interval))},
    ConfigKey{
        "parameters.directory", "", "a directory's absolute path; '': none",
        "where the files lie that plans name by `parameters` (SeKV, trained), before those shipped",
        KVS_READS(Directory(v, &c->store.parameters_directory)), kText},
    ConfigKey{
        "shutdown.timeout", "4s", "a duration, 100ms to 5s",
        "a shutdown that takes longer, without what it writes, is cut short, with exit code 1",
        KVS_READS(
            DurationIn(v, microseconds(100'000), microseconds(5'000'000), &c->shutdown_timeout)),
        kAny, kReloads},
    ConfigKey{"shutdown.write_timeout", "20s", "0: not at all; else a duration up to 10m",
              "how long a shutdown goes on writing what engines have computed to disk and remote",
              KVS_READS(DurationIn(v, microseconds(0), microseconds(600'000'000),
                                   &c->shutdown_write_timeout)),
              kAny, kReloads},
    ConfigKey{"log.level", "info", "trace, debug, info, warn (or warning), error",
              "least severe events that are written", KVS_READS(ParseLogLevel(v, &c->log_level)),
              kText, kReloads},
    ConfigKey{"log.format", "text", "text, json", "form of a line on stderr",
              [](std::string_view v, Config* c) {
                c->log_format = v == "json" ? LogFormat::kJson : LogFormat::kText;
                return v == "json" || v == "text";
              },
              kText},
    ConfigKey{
        "http.listen", "", "127.0.0.1:PORT, [::1]:PORT or unix:/PATH; '': nowhere",
        "where /metrics, the probes and the status page are served, to everybody on this machine",
        // CheckTogether says what is wrong with its host.
        KVS_READS(Text(v, &c->http_listen) && IsHttpAddress(v)), kText},
    ConfigKey{
        "trace.endpoint", "",
        "http://ADDRESS[:PORT][/PATH], such as http://127.0.0.1:4318/v1/traces; '': nowhere",
        "OpenTelemetry collector that gets the spans of traced requests, as OTLP/HTTP in JSON",
        KVS_READS(Text(v, &c->trace_endpoint) && (v.empty() || ParseTraceEndpoint(v).has_value())),
        kText},
    ConfigKey{"recall.every", "4096", "1 to 1000000000; 0: never",
              "of decode steps whose plan selects, about one in so many is measured beside full "
              "attention, for the metrics",
              KVS_READS(NumberIn(v, 0, 1'000'000'000, &c->store.recall_every)), kAny, kReloads},
    ConfigKey{"debug.coredump", "false", "true, false",
              "allow core dumps and debuggers; a dump holds users' caches",
              [](std::string_view v, Config* c) {
                c->coredump = v == "true";
                return v == "true" || v == "false";
              }},
};

}  // namespace

std::span<const ConfigKey> ConfigKeys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all(kDaemonKeys.begin(), kDaemonKeys.end());
    all.insert(all.end(), RemoteKeys().begin(), RemoteKeys().end());
    all.insert(all.end(), LimitKeys().begin(), LimitKeys().end());
    return all;
  }();
  return keys;
}

std::string EnvironmentOf(const ConfigKey& key) {
  if (key.name == "socket.path") return "KVSTRATA_SOCKET";
  std::string name = "KVSTRATA_" + std::string(key.name);
  for (char& c : name) c = c == '.' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

const ConfigKey* FindConfigKey(std::string_view name) {
  const auto at = std::ranges::find(ConfigKeys(), name, &ConfigKey::name);
  return at == ConfigKeys().end() ? nullptr : &*at;
}

bool Reloads(std::string_view name) {
  if (IsPlanKey(name) || IsUserLimitKey(name)) return true;
  if (IsTenantKey(name)) return TenantKeyReloads(name);
  const ConfigKey* key = FindConfigKey(name);
  return key != nullptr && key->reloads;
}

size_t EditDistance(std::string_view a, std::string_view b) {
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

std::string_view NearestConfigKey(std::string_view name) {
  std::string_view best;
  // Where last words are equally near (disk.path, socket.path), whole names decide.
  std::pair<size_t, size_t> least = {std::max<size_t>(2, name.size() / 4) + 1, 0};
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string_view bare = key.name.substr(key.name.rfind('.') + 1);
    const size_t whole = EditDistance(name, key.name);
    // Short words are near by chance (name, path): no more than half of one may differ.
    const std::string_view last = name.substr(name.rfind('.') + 1);
    const size_t words = EditDistance(last, bare);
    const std::pair distance(words * 2 < last.size() ? std::min(whole, words) : whole, whole);
    if (distance < least) {
      least = distance;
      best = key.name;
    }
  }
  return best;
}

std::string BackendNames() {
  std::string names;
  for (const Backend& b : Backends()) {
    names += (names.empty() ? "" : ", ") + std::string(b.name);
  }
  return names;
}

}  // namespace kvstrata
