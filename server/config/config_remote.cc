// SPDX-License-Identifier: Apache-2.0
#include <net/if.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "server/config/config_keys.h"
#include "server/config/config_numbers.h"
#include "server/store/options/user_name.h"
#include "server/tier/redis/client/redis_slots.h"
#include "server/tier/remote/node_announcement.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr microseconds kMillisecond{1000}, kMinute{60'000'000}, kDay{86'400'000'000};
constexpr size_t kMostServers = 64, kMostNameBytes = 64, kMostTenants = 1024, kMostTextBytes = 256;
constexpr std::string_view kTenants = "remote.tenants.";
constexpr std::string_view kName = "name", kReadRate = "read_rate", kWriteRate = "write_rate";

// "HOST:PORT[,HOST:PORT...]", none of them twice.
bool AreServers(std::string_view text) {
  std::vector<redis::RedisAddress> servers;
  for (;;) {
    const size_t comma = std::min(text.find(','), text.size());
    const Result<redis::RedisAddress> server = redis::ParseRedisAddress(text.substr(0, comma));
    if (!server.ok() || std::ranges::find(servers, *server) != servers.end()) return false;
    servers.push_back(*server);
    if (servers.size() > kMostServers) return false;
    if (comma == text.size()) return true;
    text.remove_prefix(comma + 1);
  }
}

// With its port: what others are told is what is written.
bool IsNodeAddress(std::string_view text) {
  const Result<redis::RedisAddress> address = redis::ParseRedisAddress(text);
  return address.ok() && address->ToString() == text && text.size() <= remote::kMaxNodeAddressBytes;
}

// False: there are some, which are to be looked at.
bool TakeServers(const char* engine, std::string_view servers, Config* c) {
  c->remote.servers.erase(engine);
  if (!servers.empty()) c->remote.servers.emplace(engine, servers);
  return servers.empty();
}

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
  *out = text;
  return text.empty() || text.front() == '/';
}

constexpr std::string_view kRate = "a size, 1MiB to 1PiB; 0: no limit";

constexpr std::array kRemoteKeys = {
    ConfigKey{"remote.redis", "", "HOST:PORT[,HOST:PORT...], up to 64; '': no remote tier",
              "servers of the Redis or Valkey cluster that nodes share pages through; those named "
              "tell of the others",
              KVS_READS(TakeServers("redis", v, c) || AreServers(v)), kText},
    ConfigKey{
        "remote.mooncake", "", "HOST:PORT; '': no Mooncake Store",
        "master of the Mooncake Store that nodes share pages through, in place of remote.redis",
        [](std::string_view v, Config* c) {
          c->remote.agent.master = v;
          return TakeServers("mooncake", v, c) || IsNodeAddress(v);
        },
        kText},
    ConfigKey{"remote.mooncake_metadata", "P2PHANDSHAKE",
              "P2PHANDSHAKE, or a URL of up to 256 characters",
              "where Mooncake's clients find each other, as its other clients have it",
              [](std::string_view v, Config* c) {
                c->remote.agent.metadata = v;
                return v == "P2PHANDSHAKE" ||
                       (v.find("://") != std::string_view::npos && v.size() <= kMostTextBytes);
              },
              kText},
    ConfigKey{"remote.mooncake_protocol", "tcp", "tcp, rdma", "how Mooncake moves bytes",
              [](std::string_view v, Config* c) {
                c->remote.agent.protocol = v;
                return v == "tcp" || v == "rdma";
              },
              kText},
    ConfigKey{"remote.mooncake_devices", "",
              "names with commas, up to 256 characters; '': as Mooncake finds them",
              "RDMA devices that Mooncake uses",
              [](std::string_view v, Config* c) {
                c->remote.agent.devices = v;
                return v.find(' ') == std::string_view::npos && v.size() <= kMostTextBytes;
              },
              kText},
    ConfigKey{"remote.mooncake_interface", "lo", "a network interface, 1 to 15 characters",
              "by its IPv4 address the store knows this node",
              [](std::string_view v, Config* c) {
                c->remote.agent.interface = v;
                return !v.empty() && v.size() < IFNAMSIZ;
              },
              kText},
    ConfigKey{"remote.mooncake_python", "/usr/bin/python3", "a file's absolute path",
              "the Python that has Mooncake's package",
              KVS_READS(IsFile(v, &c->remote.agent.python) && !v.empty()), kText},
    ConfigKey{"remote.secret_file", "", "a file's absolute path; required with a remote tier",
              "one line of 32 to 512 characters, the same on every node; mode 0600",
              KVS_READS(IsFile(v, &c->remote.secret_file)), kText},
    ConfigKey{"remote.user", "", "up to 64 characters",
              "user of the servers' ACL that the daemon logs in as; '': the default one",
              [](std::string_view v, Config* c) {
                c->remote.user = v;
                return v.size() <= kMostNameBytes;
              },
              kText},
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
              [](std::string_view v, Config* c) {
                c->remote.seal = v;
                return v == "none" || v == "gcm";
              },
              kText},
    ConfigKey{"remote.tenant", "kvstrata", "1 to 64 characters",
              "name under which nodes share: those with another one find nothing of each other",
              [](std::string_view v, Config* c) {
                c->remote.tenant = v;
                return !v.empty() && v.size() <= kMostNameBytes;
              },
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
              [](std::string_view v, Config* c) {
                return RateIn(v, &c->remote.pages.searches->tenant_read_rates.usual);
              },
              kAny, kReloads},
    ConfigKey{"remote.tenant_write_rate", "0", kRate,
              "bytes a second of each tenant's that may go there; what is beyond does not",
              KVS_READS(RateIn(v, &c->remote.pages.writer.tenant_rates.usual)), kAny, kReloads},
    ConfigKey{"remote.queue_bytes", "1GiB", "a size, 1MiB to 1PiB",
              "pages and artefacts that may wait to go there; more do not",
              KVS_READS(SizeIn(v, kMiB, kPiB, &c->remote.pages.writer.queue_bytes))},
    ConfigKey{"remote.announce", "", "HOST:PORT, an address of this machine; '': not announced",
              "where other nodes ask this one what it has of a prompt, and it listens; needs "
              "remote.tls_cert_file, tls_key_file and tls_ca_file but on loopback",
              [](std::string_view v, Config* c) {
                c->remote.announce = v;
                return v.empty() || IsNodeAddress(v);
              },
              kText},
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

}  // namespace

std::span<const ConfigKey> RemoteKeys() { return kRemoteKeys; }

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

RedisTierOptions RedisOptionsOf(const RemoteConfig& config) {
  RedisTierOptions options;
  const auto servers = config.servers.find("redis");
  const bool none = servers == config.servers.end();
  for (std::string_view text = none ? std::string_view() : servers->second; !text.empty();) {
    const size_t comma = std::min(text.find(','), text.size());
    options.servers.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  options.user = config.user;
  options.password_file = config.password_file;
  options.tls = config.tls;
  options.ttl = std::chrono::duration_cast<std::chrono::milliseconds>(config.ttl);
  return options;
}

Status CheckRemoteEngine(const RemoteConfig& config) {
  if (!config.on() && !config.announce.empty()) {
    return InvalidArgument("REMOTE_ANNOUNCE", "remote.announce = '" + config.announce +
                                                  "' needs remote.redis, which is not set: nodes "
                                                  "announce themselves in its servers; name them, "
                                                  "or leave remote.announce out");
  }
  if (!config.on()) return OkStatus();
  const auto named = [](const auto& engine) {
    return "remote." + engine.first + " = '" + engine.second + "'";
  };
  const auto refused = [&](const std::string& other, const char* why) {
    return InvalidArgument("REMOTE_ENGINE",
                           named(*config.servers.begin()) + " and " + other + ": " + why);
  };
  if (config.servers.size() > 1) {
    return refused(named(*std::next(config.servers.begin())),
                   "there is one remote tier; leave one of them out");
  }
  if (config.agent.master.empty()) return OkStatus();
  if (!config.announce.empty()) {
    return refused("remote.announce = '" + config.announce + "'",
                   "nodes announce themselves in Redis alone; leave remote.announce out");
  }
  if (!config.user.empty() || !config.password_file.empty() || config.tls.on) {
    return refused("remote.user, remote.password_file or remote.tls",
                   "Mooncake Store has neither users nor TLS; leave them out, and let a network of "
                   "its own and remote.seal protect it");
  }
  return OkStatus();
}

}  // namespace kvstrata
