// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "server/config/config_keys.h"
#include "server/config/config_numbers.h"
#include "server/config/remote_engines.h"
#include "server/store/options/user_name.h"
#include "server/tier/redis/client/redis_slots.h"
#include "server/tier/remote/node_announcement.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr microseconds kMillisecond{1000}, kMinute{60'000'000}, kDay{86'400'000'000};
constexpr size_t kMostNameBytes = 64, kMostTenants = 1024;
constexpr std::string_view kTenants = "remote.tenants.";
constexpr std::string_view kName = "name", kReadRate = "read_rate", kWriteRate = "write_rate";

bool ParseWrite(std::string_view text, TierWrite* out) {
  if (text == "reused") *out = TierWrite::kReused;
  if (text == "all") *out = TierWrite::kAll;
  if (text == "off") *out = TierWrite::kOff;
  return text == "reused" || text == "all" || text == "off";
}

bool RateIn(std::string_view text, uint64_t* out) {
  uint64_t rate = 0;
  if (!SizeIn(text, 0, kPiB, &rate) || (rate != 0 && rate < kMiB)) return false;
  *out = rate;
  return true;
}

// A path key's value: absolute, or none.
bool IsFile(std::string_view text, std::string* out) {
  return Take(text, out) && (text.empty() || text.front() == '/');
}

constexpr std::string_view kRate = "a size, 1MiB to 1PiB; 0: no limit";

constexpr std::array kOwnKeys = {
    ConfigKey{"remote.secret_file", "", "a file's absolute path; required with a remote tier",
              "one line of 32 to 512 characters, the same on every node; mode 0600",
              KVS_READS(IsFile(v, &c->remote.secret_file)), kText},
    ConfigKey{"remote.user", "", "up to 64 characters",
              "user of the servers' ACL that the daemon logs in as; '': the default one",
              KVS_READS(Take(v, &c->remote.user) && v.size() <= kMostNameBytes), kText},
    ConfigKey{"remote.password_file", "", "a file's absolute path; '': no password",
              "its first line is the password that the servers ask for",
              KVS_READS(IsFile(v, &c->remote.password_file)), kText},
    ConfigKey{"remote.tls", "false", "true, false",
              "connections to the servers are encrypted, and their certificates checked",
              [](std::string_view v, Config* c) {
                c->remote.tls.on = v == "true";
                return v == "true" || v == "false";
              }},
    ConfigKey{"remote.tls_ca_file", "", "a file's absolute path; '': the system's authorities",
              "authorities that the servers' certificates are checked against",
              KVS_READS(IsFile(v, &c->remote.tls.authorities_file)), kText},
    ConfigKey{"remote.tls_cert_file", "", "a file's absolute path; '': none",
              "the daemon's certificate, for servers that ask for one",
              KVS_READS(IsFile(v, &c->remote.tls.certificate_file)), kText},
    ConfigKey{"remote.tls_key_file", "", "a file's absolute path; '': none",
              "the key of that certificate", KVS_READS(IsFile(v, &c->remote.tls.key_file)), kText},
    ConfigKey{"remote.seal", "none", "none, gcm",
              "what the servers see of values: their bytes, or AES-256-GCM",
              KVS_READS(Take(v, &c->remote.seal) && (v == "none" || v == "gcm")), kText},
    ConfigKey{"remote.tenant", "kvstrata", "1 to 64 characters",
              "name under which nodes share: those with another one find nothing of each other",
              KVS_READS(Take(v, &c->remote.tenant) && !v.empty() && v.size() <= kMostNameBytes),
              kText},
    ConfigKey{"remote.ttl", "7d", "a duration, 1min to 3650d",
              "how long a value stays that nobody puts again; older ones are refused",
              KVS_READS(DurationIn(v, kMinute, 3650 * kDay, &c->remote.ttl))},
    ConfigKey{"remote.write", "reused", "reused, all, off",
              "what goes there: what was opened twice, is pinned or a codec's artefact; all pages; "
              "nothing",
              KVS_READS(ParseWrite(v, &c->remote.pages.writer.write)), kText, kReloads},
    ConfigKey{"remote.min_tokens", "256", "1 to 16777216",
              "it is asked only where so many tokens of a prompt are missing here",
              KVS_READS(NumberIn(v, 1, 1 << 24, &c->remote.pages.searches->min_tokens)), kAny,
              kReloads},
    ConfigKey{"remote.deadline", "1s", "a duration, 1ms to 60s",
              "how long an opening sequence may wait for it, question and values together",
              KVS_READS(DurationIn(v, kMillisecond, kMinute, &c->remote.pages.searches->deadline)),
              kAny, kReloads},
    ConfigKey{"remote.deadline_per_1024_tokens", "100ms", "a duration, 0 to 10s",
              "so much more for each 1024 tokens that are missing",
              KVS_READS(DurationIn(v, microseconds(0), microseconds(10'000'000),
                                   &c->remote.pages.searches->deadline_per_1024)),
              kAny, kReloads},
    ConfigKey{
        "remote.deadline_most", "10s", "a duration, 1ms to 60s", "the most that these two come to",
        KVS_READS(DurationIn(v, kMillisecond, kMinute, &c->remote.pages.searches->deadline_most)),
        kAny, kReloads},
    ConfigKey{"remote.miss_ttl", "5s", "a duration, 0 to 60min",
              "what it did not have is not asked for again so long",
              KVS_READS(DurationIn(v, microseconds(0), 60 * kMinute,
                                   &c->remote.pages.searches->miss_ttl)),
              kAny, kReloads},
    ConfigKey{"remote.read_rate", "0", kRate,
              "bytes a second that opens read from it; what is beyond is computed",
              KVS_READS(RateIn(v, &c->remote.pages.searches->read_rate)), kAny, kReloads},
    ConfigKey{"remote.write_rate", "0", kRate, "bytes a second that go there",
              KVS_READS(RateIn(v, &c->remote.pages.writer.rate)), kAny, kReloads},
    ConfigKey{"remote.tenant_read_rate", "0", kRate, "the same for opens of each tenant",
              KVS_READS(RateIn(v, &c->remote.pages.searches->tenant_read_rates.usual)), kAny,
              kReloads},
    ConfigKey{"remote.tenant_write_rate", "0", kRate,
              "bytes a second of each tenant's that may go there; what is beyond does not",
              KVS_READS(RateIn(v, &c->remote.pages.writer.tenant_rates.usual)), kAny, kReloads},
    ConfigKey{"remote.queue_bytes", "1GiB", "a size, 1MiB to 1PiB",
              "pages and artefacts that may wait to go there; more do not",
              KVS_READS(SizeIn(v, kMiB, kPiB, &c->remote.pages.writer.queue_bytes))},
    ConfigKey{"remote.announce", "", "HOST:PORT, an address of this machine; '': not announced",
              "where other nodes ask this one what it has of a prompt, and it listens; needs "
              "remote.tls_cert_file, tls_key_file and tls_ca_file but on loopback",
              KVS_READS(Take(v, &c->remote.announce) && (v.empty() || IsNodeAddress(v))), kText},
};

bool IsTenantName(std::string_view text) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !text.empty() && text.size() <= kMostNameBytes &&
         text.find_first_not_of(kLetters) == text.npos;
}

// "": it is so now; else what is allowed.
std::string MapTenant(const std::string& user, std::string_view name, ClusterTenants* tenants) {
  if (!IsTenantName(name)) return "1 to 64 of a-z A-Z 0-9 . _ -";
  if (tenants->size() >= kMostTenants) return "at most 1024 users with a name";
  const std::string other = tenants->Map(user, name);
  if (other.empty()) return "";
  return "a name of one user of this node alone, and " + other +
         " has it: with equal keys each would be given the other's pages in memory";
}

// The same.
std::string SetTenantRate(const std::string& user, std::string_view text,
                          TenantRatesOptions* rates) {
  uint64_t rate = 0;
  if (!RateIn(text, &rate)) return std::string(kRate);
  if (rates->tenants.size() >= kMostTenants) return "at most 1024 users with a rate";
  rates->tenants[user] = rate;
  return "";
}

std::string Named(const std::pair<const std::string, std::string>& engine) {
  return "remote." + engine.first + " = '" + engine.second + "'";
}

}  // namespace

std::span<const ConfigKey> RemoteKeys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    for (const RemoteEngineRow* const engine : kRemoteEngines) {
      all.insert(all.end(), engine->keys.begin(), engine->keys.end());
    }
    all.insert(all.end(), kOwnKeys.begin(), kOwnKeys.end());
    return all;
  }();
  return keys;
}

bool TakeServers(std::string_view engine, std::string_view servers, Config* c) {
  c->remote.servers.erase(std::string(engine));
  if (!servers.empty()) c->remote.servers.emplace(engine, servers);
  return servers.empty();
}

bool IsNodeAddress(std::string_view text) {
  const Result<redis::RedisAddress> address = redis::ParseRedisAddress(text);
  return address.ok() && address->ToString() == text && text.size() <= remote::kMaxNodeAddressBytes;
}

bool IsTenantKey(std::string_view key) { return key.starts_with(kTenants); }

// Another name would give a user the pages in memory that another one has under it.
bool TenantKeyReloads(std::string_view key) { return !key.ends_with(".name"); }

Status ApplyTenantKey(std::string_view key, std::string_view value, std::string_view where,
                      Config* config) {
  const std::string_view rest = key.substr(kTenants.size());
  const size_t point = std::min(rest.rfind('.'), rest.size());
  const std::string user(rest.substr(0, point));
  const std::string_view field = rest.substr(std::min(point + 1, rest.size()));
  const std::string at = std::string(where) + ": " + std::string(key);
  if (!UidOf(user) || (field != kName && field != kReadRate && field != kWriteRate)) {
    return InvalidArgument("CONFIG_KEY",
                           at + ": no such key; allowed: name, read_rate and write_rate of a user "
                                "\"uid:N\", such as remote.tenants.\"uid:1000\".name");
  }
  std::string allowed;
  if (field == kName) allowed = MapTenant(user, value, &config->store.cluster_tenants);
  TierRowOptions& pages = config->remote.pages;
  if (field == kReadRate) allowed = SetTenantRate(user, value, &pages.searches->tenant_read_rates);
  if (field == kWriteRate) allowed = SetTenantRate(user, value, &pages.writer.tenant_rates);
  if (allowed.empty()) return OkStatus();
  return InvalidArgument("CONFIG_VALUE",
                         at + " = '" + std::string(value) + "'; allowed: " + allowed);
}

std::string RemoteEngineKeys() {
  std::string keys;
  for (const RemoteEngineRow* const engine : kRemoteEngines) {
    keys += std::string(keys.empty() ? "remote." : " or remote.") + std::string(engine->name);
  }
  return keys;
}

const RemoteEngineRow& RemoteEngineOf(const RemoteConfig& config) {
  const std::string_view name = config.servers.begin()->first;
  const auto row = std::ranges::find(kRemoteEngines, name, &RemoteEngineRow::name);
  KVS_CHECK(row != std::end(kRemoteEngines));
  return **row;
}

Status RefusedBeside(const RemoteConfig& config, const std::string& other, const char* why) {
  return InvalidArgument("REMOTE_ENGINE",
                         Named(*config.servers.begin()) + " and " + other + ": " + why);
}

Status CheckRemoteEngine(const RemoteConfig& config) {
  if (!config.on() && !config.announce.empty()) {
    return InvalidArgument("REMOTE_ANNOUNCE", "remote.announce = '" + config.announce +
                                                  "' needs remote.redis, which is not set: nodes "
                                                  "announce themselves in its servers; name them, "
                                                  "or leave remote.announce out");
  }
  if (!config.on()) return OkStatus();
  if (config.servers.size() > 1) {
    return RefusedBeside(config, Named(*std::next(config.servers.begin())),
                         "there is one remote tier; leave one of them out");
  }
  const RemoteEngineRow& engine = RemoteEngineOf(config);
  return engine.check == nullptr ? OkStatus() : engine.check(config);
}

}  // namespace kvstrata
