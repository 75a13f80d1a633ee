// SPDX-License-Identifier: Apache-2.0
// The configuration: every key, from every origin, and every mistake told (docs/configuration.md).
// Beside it: single values (config_values_test.cc), files (config_files_test.cc), users
// (config_users_test.cc).
#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "server/config/config_keys.h"
#include "tests/server/config_fixture.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;
using test::ConfigTest;
using testing::HasSubstr;
using testing::Not;

TEST_F(ConfigTest, NothingIsRequired) {
  const Config config = Load();
  EXPECT_EQ(config.socket, "/tmp/kvstrata-1000/kvstratad.sock");
  EXPECT_EQ(config.socket_directory, mode_t{0700});
  EXPECT_EQ(config.store.device_bytes, uint64_t{4} << 30);
  EXPECT_EQ(config.store.host_bytes, uint64_t{4} << 30);
  EXPECT_EQ(config.attach.hello_timeout, microseconds(2'000'000));
  EXPECT_EQ(config.attach.poll, microseconds(50));
  EXPECT_LE(config.shutdown_timeout, microseconds(5'000'000));
  EXPECT_FALSE(config.coredump);
  EXPECT_TRUE(config.files.empty());
  for (const ConfigEntry& e : config.entries) {
    EXPECT_EQ(e.origin, "default") << e.key;
    EXPECT_FALSE(e.description.empty()) << e.key;
  }
}

TEST_F(ConfigTest, DefaultSocket) {
  sources_.uid = 0;
  EXPECT_EQ(Load().socket, "/run/kvstrata/kvstratad.sock");
  EXPECT_EQ(Load().socket_directory, mode_t{0755});
  sources_.environment["XDG_RUNTIME_DIR"] = "/run/user/1000";
  EXPECT_EQ(Load().socket, "/run/user/1000/kvstrata/kvstratad.sock");
  EXPECT_EQ(Load().socket_directory, mode_t{0700});
  sources_.environment["KVSTRATA_SOCKET"] = "/x/k.sock";
  EXPECT_EQ(Load().socket, "/x/k.sock");
  EXPECT_EQ(Load().socket_directory, mode_t{0}) << "only a default directory is made";
}

TEST_F(ConfigTest, Precedence) {
  const auto check = [this](std::string_view value, std::string_view origin) {
    const Config config = Load();
    EXPECT_EQ(Entry(config, "pool.device_bytes").value, value);
    EXPECT_EQ(Entry(config, "pool.device_bytes").origin, origin);
  };
  check("4GiB", "default");
  UseFile("[pool]\ndevice_bytes = \"1GiB\"\n");
  check("1GiB", "file");
  sources_.environment["KVSTRATA_POOL_DEVICE_BYTES"] = "2GiB";
  check("2GiB", "environment");
  sources_.flags = {{"pool.device_bytes", "3GiB"}, {"pool.device_bytes", "5GiB"}};
  check("5GiB", "flag");
  EXPECT_EQ(Load().store.device_bytes, uint64_t{5} << 30);
}

TEST_F(ConfigTest, AVariableAboveAFileIsAWarning) {
  UseFile("[pool]\ndevice_bytes = \"1GiB\"\n");
  sources_.environment["KVSTRATA_POOL_DEVICE_BYTES"] = "1GiB";
  sources_.environment["KVSTRATA_POOL_HOST_BYTES"] = "2GiB";
  EXPECT_TRUE(Load().warnings.empty()) << "it changes nothing";
  sources_.environment["KVSTRATA_POOL_DEVICE_BYTES"] = "2GiB";
  const Config config = Load();
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_THAT(
      config.warnings[0],
      HasSubstr("KVSTRATA_POOL_DEVICE_BYTES = '2GiB' overrides pool.device_bytes = '1GiB' of " +
                sources_.file + ":2:"));
}

TEST_F(ConfigTest, EmptyEnvironmentIsUnset) {
  sources_.environment["KVSTRATA_POOL_HOST_BYTES"] = "";
  EXPECT_EQ(Entry(Load(), "pool.host_bytes").origin, "default");
}

// Every key: a value that it takes, and one that it refuses by name.
struct KeyCase {
  const char* key;
  const char* environment;
  const char* good;
  const char* bad;
};
const KeyCase kKeyCases[] = {
    {"socket.path", "KVSTRATA_SOCKET", "/tmp/k.sock", "/tmp/"},
    {"socket.group", "KVSTRATA_SOCKET_GROUP", "0", "no such group"},
    {"pool.device", "KVSTRATA_POOL_DEVICE", "cuda", "GPU-1"},
    {"pool.device_bytes", "KVSTRATA_POOL_DEVICE_BYTES", "64 MiB", "4 gigs"},
    {"pool.host_bytes", "KVSTRATA_POOL_HOST_BYTES", "1073741824", "17TiB"},
    {"pool.host_numa", "KVSTRATA_POOL_HOST_NUMA", "interleave", "near"},
    {"pool.arena_bytes", "KVSTRATA_POOL_ARENA_BYTES", "64KiB", "65537"},
    {"pool.high_percent", "KVSTRATA_POOL_HIGH_PERCENT", "100", "101"},
    {"pool.low_percent", "KVSTRATA_POOL_LOW_PERCENT", "50", "0"},
    {"move.bytes_per_second", "KVSTRATA_MOVE_BYTES_PER_SECOND", "0", "1KiB"},
    {"move.promote_rate", "KVSTRATA_MOVE_PROMOTE_RATE", "64MiB", "1MiB"},
    {"pin.limit_bytes", "KVSTRATA_PIN_LIMIT_BYTES", "1MiB", "2PiB"},
    {"session.max", "KVSTRATA_SESSION_MAX", "1", "0"},
    {"session.headroom_tokens", "KVSTRATA_SESSION_HEADROOM_TOKENS", "16", "-1"},
    {"attach.hello_timeout", "KVSTRATA_ATTACH_HELLO_TIMEOUT", "500ms", "1ms"},
    {"health.patience", "KVSTRATA_HEALTH_PATIENCE", "500ms", "99ms"},
    {"attach.poll", "KVSTRATA_ATTACH_POLL", "0", "11ms"},
    {"attach.reply_backlog_bytes", "KVSTRATA_ATTACH_REPLY_BACKLOG_BYTES", "8KiB", "1KiB"},
    {"chunks.bytes", "KVSTRATA_CHUNKS_BYTES", "64MiB", "4198401"},
    {"chunks.layout_percent", "KVSTRATA_CHUNKS_LAYOUT_PERCENT", "50", "0"},
    {"backend", "KVSTRATA_BACKEND", "ref", "cuda"},
    {"threads", "KVSTRATA_THREADS", "2", "1025"},
    {"work.threads", "KVSTRATA_WORK_THREADS", "0", "257"},
    {"work.op_threads", "KVSTRATA_WORK_OP_THREADS", "2", "0"},
    {"work.queue", "KVSTRATA_WORK_QUEUE", "1", "0"},
    {"work.cpus", "KVSTRATA_WORK_CPUS", "0-3,6", "3-1"},
    {"disk.path", "KVSTRATA_DISK_PATH", "/tmp/kv", "kv"},
    {"disk.budget_bytes", "KVSTRATA_DISK_BUDGET_BYTES", "1TiB", "much"},
    {"disk.segment_bytes", "KVSTRATA_DISK_SEGMENT_BYTES", "1MiB", "65537"},
    {"disk.start_timeout", "KVSTRATA_DISK_START_TIMEOUT", "5s", "1ms"},
    {"disk.queue", "KVSTRATA_DISK_QUEUE", "1", "0"},
    {"disk.readers", "KVSTRATA_DISK_READERS", "4", "17"},
    {"disk.load_timeout", "KVSTRATA_DISK_LOAD_TIMEOUT", "5s", "0"},
    {"disk.checkpoint_interval", "KVSTRATA_DISK_CHECKPOINT_INTERVAL", "5s", "48h"},
    {"parameters.directory", "KVSTRATA_PARAMETERS_DIRECTORY", "/tmp", "tmp"},
    {"shutdown.timeout", "KVSTRATA_SHUTDOWN_TIMEOUT", "1s", "6s"},
    {"shutdown.write_timeout", "KVSTRATA_SHUTDOWN_WRITE_TIMEOUT", "0", "11m"},
    {"log.level", "KVSTRATA_LOG_LEVEL", "warn", "loud"},
    {"log.format", "KVSTRATA_LOG_FORMAT", "json", "xml"},
    {"http.listen", "KVSTRATA_HTTP_LISTEN", "127.0.0.1:9465", "9465"},
    {"trace.endpoint", "KVSTRATA_TRACE_ENDPOINT", "http://[::1]:4318", "http://user@127.0.0.1/"},
    {"recall.every", "KVSTRATA_RECALL_EVERY", "0", "-1"},
    {"debug.coredump", "KVSTRATA_DEBUG_COREDUMP", "true", "yes"},
    {"remote.redis", "KVSTRATA_REMOTE_REDIS", "redis-0:6379,[::1]:7000", "a:1,a:1"},
    {"remote.mooncake", "KVSTRATA_REMOTE_MOONCAKE", "master:50051", "master"},
    {"remote.mooncake_metadata", "KVSTRATA_REMOTE_MOONCAKE_METADATA", "http://m:8080/metadata",
     "m"},
    {"remote.mooncake_protocol", "KVSTRATA_REMOTE_MOONCAKE_PROTOCOL", "rdma", "udp"},
    {"remote.mooncake_devices", "KVSTRATA_REMOTE_MOONCAKE_DEVICES", "mlx5_0,mlx5_1",
     "mlx5_0, mlx5_1"},
    {"remote.mooncake_interface", "KVSTRATA_REMOTE_MOONCAKE_INTERFACE", "ib0", "0123456789abcdef"},
    {"remote.mooncake_python", "KVSTRATA_REMOTE_MOONCAKE_PYTHON", "/opt/mooncake/bin/python",
     "python"},
    {"remote.secret_file", "KVSTRATA_REMOTE_SECRET_FILE", "/etc/kvstrata/secret", "secret"},
    {"remote.user", "KVSTRATA_REMOTE_USER", "kvstrata",
     "0123456789012345678901234567890123456789012345678901234567890123x"},
    {"remote.password_file", "KVSTRATA_REMOTE_PASSWORD_FILE", "/etc/kvstrata/password", "password"},
    {"remote.tls", "KVSTRATA_REMOTE_TLS", "true", "yes"},
    {"remote.tls_ca_file", "KVSTRATA_REMOTE_TLS_CA_FILE", "/etc/ssl/ca.pem", "ca.pem"},
    {"remote.tls_cert_file", "KVSTRATA_REMOTE_TLS_CERT_FILE", "/etc/ssl/node.pem", "node.pem"},
    {"remote.tls_key_file", "KVSTRATA_REMOTE_TLS_KEY_FILE", "/etc/ssl/node.key", "node.key"},
    {"remote.seal", "KVSTRATA_REMOTE_SEAL", "gcm", "aes"},
    {"remote.tenant", "KVSTRATA_REMOTE_TENANT", "team",
     "0123456789012345678901234567890123456789012345678901234567890123x"},
    {"remote.ttl", "KVSTRATA_REMOTE_TTL", "1d", "1s"},
    {"remote.write", "KVSTRATA_REMOTE_WRITE", "all", "some"},
    {"remote.min_tokens", "KVSTRATA_REMOTE_MIN_TOKENS", "1024", "0"},
    {"remote.deadline", "KVSTRATA_REMOTE_DEADLINE", "500ms", "0"},
    {"remote.deadline_per_1024_tokens", "KVSTRATA_REMOTE_DEADLINE_PER_1024_TOKENS", "0", "11s"},
    {"remote.deadline_most", "KVSTRATA_REMOTE_DEADLINE_MOST", "5s", "61s"},
    {"remote.miss_ttl", "KVSTRATA_REMOTE_MISS_TTL", "0", "61min"},
    {"remote.read_rate", "KVSTRATA_REMOTE_READ_RATE", "100MiB", "1KiB"},
    {"remote.write_rate", "KVSTRATA_REMOTE_WRITE_RATE", "100MiB", "1KiB"},
    {"remote.tenant_read_rate", "KVSTRATA_REMOTE_TENANT_READ_RATE", "100MiB", "1KiB"},
    {"remote.tenant_write_rate", "KVSTRATA_REMOTE_TENANT_WRITE_RATE", "100MiB", "1KiB"},
    {"remote.queue_bytes", "KVSTRATA_REMOTE_QUEUE_BYTES", "64MiB", "1KiB"},
    {"remote.announce", "KVSTRATA_REMOTE_ANNOUNCE", "10.0.0.7:7500", "10.0.0.7"},
    {"limits.sessions", "KVSTRATA_LIMITS_SESSIONS", "0", "-1"},
    {"limits.attaches_per_second", "KVSTRATA_LIMITS_ATTACHES_PER_SECOND", "50", "50/s"},
    {"limits.connections", "KVSTRATA_LIMITS_CONNECTIONS", "1000", "1000000001"},
    {"limits.models", "KVSTRATA_LIMITS_MODELS", "1", "some"},
    {"limits.sequences", "KVSTRATA_LIMITS_SEQUENCES", "100", "1e6"},
    {"limits.device_bytes", "KVSTRATA_LIMITS_DEVICE_BYTES", "50%", "101%"},
    {"limits.host_bytes", "KVSTRATA_LIMITS_HOST_BYTES", "1GiB", "2048TiB"},
    {"limits.queued_work", "KVSTRATA_LIMITS_QUEUED_WORK", "8", "8KiB"},
};

TEST_F(ConfigTest, EveryKeyIsCovered) {
  const Config config = Load();
  ASSERT_EQ(config.entries.size(), std::size(kKeyCases));
  for (size_t i = 0; i < config.entries.size(); ++i) {
    EXPECT_EQ(config.entries[i].key, kKeyCases[i].key);
  }
}

std::vector<std::string> Cells(const std::string& row) {
  std::vector<std::string> cells;
  std::istringstream in(row);
  for (std::string cell; std::getline(in, cell, '|');) {
    const size_t first = cell.find_first_not_of(' ');
    cells.push_back(
        first == cell.npos ? "" : cell.substr(first, cell.find_last_not_of(' ') + 1 - first));
  }
  return cells;  // the first is before the first bar
}

// docs/configuration.md has the table: names, variables, defaults, what reloads.
TEST(ConfigKeys, TheDocumentHasThem) {
  std::ifstream document(KVS_SOURCE_DIR "/docs/configuration.md");
  std::map<std::string, std::vector<std::string>> rows;
  for (std::string line; std::getline(document, line);) {
    if (line.starts_with("| `")) {
      const std::vector<std::string> cells = Cells(line);
      rows[cells.at(1)] = cells;
    }
  }
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name = "`" + std::string(key.name) + "`";
    ASSERT_TRUE(rows.contains(name)) << name;
    const std::vector<std::string>& row = rows[name];
    ASSERT_GE(row.size(), 7u) << name;
    EXPECT_EQ(row[2], "`" + EnvironmentOf(key) + "`");
    if (!key.fallback.empty()) {
      EXPECT_TRUE(row[3].starts_with("`" + std::string(key.fallback) + "`")) << name << row[3];
    }
    EXPECT_EQ(row[5], key.reloads ? "yes" : "") << name;
    rows.erase(name);
  }
  EXPECT_EQ(rows["`remote.tenants.USER.name`"].at(5), "");
  rows.erase("`remote.tenants.USER.name`");
  for (const char* table :
       {"`limits.users.USER.LIMIT`", "`plans.NAME`", "`remote.tenants.USER.read_rate`",
        "`remote.tenants.USER.write_rate`"}) {
    EXPECT_EQ(rows[table].at(5), "yes") << table;
    rows.erase(table);
  }
  for (const auto& [name, row] : rows) {
    EXPECT_FALSE(row.size() > 2 && row[2].starts_with("`KVSTRATA_")) << name << " is no key";
  }
}

class ConfigKeyTest : public ConfigTest, public testing::WithParamInterface<KeyCase> {};

TEST_P(ConfigKeyTest, TakesAGoodValueFromEverywhere) {
  const KeyCase c = GetParam();
  // Which is refused without servers to announce anything in.
  if (std::string_view(c.key) == "remote.announce") sources_.flags = {{"remote.redis", "r:6379"}};
  UseFile(std::string(c.key) + " = \"" + c.good + "\"\n");
  EXPECT_EQ(Entry(Load(), c.key).value, c.good);
  EXPECT_EQ(Entry(Load(), c.key).origin, "file");
  sources_.file.clear();
  sources_.environment[c.environment] = c.good;
  EXPECT_EQ(Entry(Load(), c.key).origin, "environment");
  sources_.environment.clear();
  sources_.flags.emplace_back(c.key, c.good);
  EXPECT_EQ(Entry(Load(), c.key).origin, "flag");
}

TEST_P(ConfigKeyTest, NamesItselfOnABadValue) {
  const KeyCase c = GetParam();
  const auto check = [&](std::string_view where) {
    const Status status = Fail();
    EXPECT_EQ(status.reason(), "CONFIG_VALUE");
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(c.key));
    EXPECT_THAT(status.message(), HasSubstr(c.bad));
    EXPECT_THAT(status.message(), HasSubstr(std::string(where)));
  };
  UseFile("\n" + std::string(c.key) + " = \"" + c.bad + "\"\n");
  check(sources_.file + ":2:");
  sources_.file.clear();
  sources_.environment[c.environment] = c.bad;
  check(c.environment);
  sources_.environment.clear();
  sources_.flags = {{c.key, c.bad}};
  check("flag");
}

INSTANTIATE_TEST_SUITE_P(Keys, ConfigKeyTest, testing::ValuesIn(kKeyCases), [](const auto& test) {
  std::string name = test.param.key;
  for (char& c : name) c = c == '.' ? '_' : c;
  return name;
});

TEST_F(ConfigTest, UnknownKeysSayWhatWasMeant) {
  UseFile("[pool]\ndevice_byte = \"1GiB\"\n");
  EXPECT_EQ(Fail().reason(), "CONFIG_KEY");
  EXPECT_THAT(Fail().message(), HasSubstr("k.toml:2:"));
  EXPECT_THAT(Fail().message(), HasSubstr("did you mean 'pool.device_bytes'?"));
  UseFile("device_bytes = \"1GiB\"\n");
  EXPECT_THAT(Fail().message(), HasSubstr("did you mean 'pool.device_bytes'?"));
  sources_.file.clear();
  sources_.flags = {{"log.leve", "info"}};
  EXPECT_THAT(Fail().message(), HasSubstr("did you mean 'log.level'?"));
  // Two keys end in "path".
  sources_.flags = {{"disk.paht", "/x"}};
  EXPECT_THAT(Fail().message(), HasSubstr("did you mean 'disk.path'?"));
  sources_.flags = {{"zzzzzzzzzzzzzzzz", "1"}};
  EXPECT_THAT(Fail().message(), HasSubstr("known: socket.path"));
  UseFile("[redis]\nx = 1\n");
  sources_.flags.clear();
  EXPECT_THAT(Fail().message(), HasSubstr("did you mean 'remote.redis'?"));
  sources_.file.clear();
  // A table's keys, which have users' and plans' names.
  for (const auto& [key, meant] :
       {std::pair{"remote.tenant.uid:1000.name", "remote.tenants.uid:1000.name"},
        std::pair{"limits.user.uid:1000.sessions", "limits.users.uid:1000.sessions"},
        std::pair{"plan.mine", "plans.mine"}, std::pair{"pins.limit_bytes", "pin.limit_bytes"}}) {
    sources_.flags = {{key, "1"}};
    EXPECT_THAT(Fail().message(), HasSubstr(std::string("did you mean '") + meant + "'?"));
  }
}

TEST_F(ConfigTest, TheKeyAtFaultIsLocatedAndNoneThatItsNameBeginsWith) {
  UseFile(
      "[remote]\nmooncake = \"m:50051\"\ntls = true\nmooncake_python = \"/no/python\"\n"
      "tls_ca_file = \"/no/ca\"\n");
  const Config config = ReadConfig(sources_).config;
  const auto located = [&config](const char* text) {
    return std::string(Located(InvalidArgument("ANY", text), config).message());
  };
  EXPECT_THAT(located("remote.mooncake_python = '/no/python': no"), HasSubstr("k.toml:4:"));
  EXPECT_THAT(located("remote.mooncake_python = '/no/python': no"), Not(HasSubstr("k.toml:2:")));
  EXPECT_THAT(located("set remote.tls_ca_file"), Not(HasSubstr("k.toml:3:")));
  EXPECT_THAT(located("set remote.tls."), HasSubstr("k.toml:3:"));
  EXPECT_THAT(located("remote.mooncake = 'm:50051' needs more"), HasSubstr("k.toml:2:"));
}

TEST_F(ConfigTest, MistakesAreALineEachWhateverAValueHolds) {
  const Status joined[] = {InvalidArgument("CONFIG_VALUE", "a = 'x\n\x1b[2J'"),
                           InvalidArgument("CONFIG_KEY", "b\x7f")};
  const Status all = Joined(joined);
  EXPECT_EQ(all.reason(), "CONFIG_VALUE");
  EXPECT_EQ(OneLine("\xc3\xbc \t"), "\xc3\xbc \\x09");
  EXPECT_EQ(all.message(), "a = 'x\\x0a\\x1b[2J'\nCONFIG_KEY: b\\x7f");
}

TEST_F(ConfigTest, MistypedEnvironmentIsAWarning) {
  sources_.environment = {{"KVSTRATA_POOL_DEVICE_BYTE", "1GiB"}, {"KVSTRATA_OTHER_PROGRAM", "x"}};
  const Config config = Load();
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_THAT(config.warnings[0], HasSubstr("KVSTRATA_POOL_DEVICE_BYTES"));
}

TEST_F(ConfigTest, EveryMistakeIsTold) {
  UseFile("[pool]\nhost_bytes = \"lots\"\ndevice_byte = \"1GiB\"\nlow_percent = 95\n");
  sources_.flags = {{"threads", "many"}, {"plans.x", "ches"}, {"work.cpus", "0"}};
  const LoadedConfig loaded = ReadConfig(sources_);
  ASSERT_EQ(loaded.mistakes.size(), 5u);
  const Status joined = Fail();
  EXPECT_EQ(joined.reason(), loaded.mistakes.front().reason());
  for (const char* words : {"'pool.device_bytes'?", "pool.host_bytes = 'lots'", "threads = 'many'",
                            "plans.x", "at most pool.high_percent, which is 90"}) {
    EXPECT_THAT(joined.message(), HasSubstr(words));
  }
  EXPECT_EQ(loaded.config.store.host_bytes, uint64_t{4} << 30) << "the default, to check the rest";
  EXPECT_EQ(loaded.config.work.cpus, std::vector<int>{0});
}

TEST_F(ConfigTest, ALowMarkAboveTheHighOneIsAMistakeIfItWasGiven) {
  sources_.flags = {{"pool.high_percent", "50"}};
  EXPECT_EQ(Load().store.high_percent, 50u);
  sources_.flags.emplace_back("pool.low_percent", "51");
  EXPECT_THAT(Fail().message(), HasSubstr("at most pool.high_percent, which is 50"));
}

TEST_F(ConfigTest, OneEngineIsTheRemoteTiers) {
  sources_.flags = {{"remote.mooncake", "master:50051"}};
  EXPECT_TRUE(Load().remote.on());
  for (const auto& [key, value] : {std::pair{"remote.redis", "redis-0:6379"},
                                   {"remote.announce", "10.0.0.7:7500"},
                                   {"remote.user", "kvstrata"},
                                   {"remote.password_file", "/etc/kvstrata/password"},
                                   {"remote.tls", "true"}}) {
    sources_.flags = {{"remote.mooncake", "master:50051"}, {key, value}};
    EXPECT_EQ(Fail().reason(), "REMOTE_ENGINE") << key;
    EXPECT_THAT(Fail().message(), HasSubstr(key));
    sources_.flags = {{"remote.redis", "redis-0:6379"}, {key, value}};
    EXPECT_TRUE(Load().remote.on()) << key;
  }
  sources_.flags = {};
  EXPECT_FALSE(Load().remote.on());
}

TEST_F(ConfigTest, NobodyAnnouncesANodeWithoutARemoteTier) {
  sources_.flags = {{"remote.announce", "127.0.0.1:7500"}};
  EXPECT_EQ(Fail().reason(), "REMOTE_ANNOUNCE");
  EXPECT_THAT(Fail().message(), HasSubstr("remote.announce = '127.0.0.1:7500' needs remote.redis"));
  sources_.flags.emplace_back("remote.redis", "redis-0:6379");
  EXPECT_TRUE(Load().remote.on());
}

TEST_F(ConfigTest, DiskBudgetsNameTheLeast) {
  sources_.flags = {{"disk.path", "/tmp/kv"}, {"disk.budget_bytes", "1MiB"}};
  EXPECT_EQ(Fail().reason(), "DISK_BUDGET");
  const std::string message(Fail().message());
  EXPECT_THAT(message, HasSubstr("disk.budget_bytes = 1048576"));
  const size_t at = message.find("at least ") + 9;
  const uint64_t least = std::stoull(message.substr(at));
  sources_.flags[1].second = std::to_string(least);
  EXPECT_EQ(Load().disk.budget_bytes, least);
  sources_.flags[1].second = std::to_string(least - 1);
  EXPECT_EQ(Fail().reason(), "DISK_BUDGET");
  sources_.flags.pop_back();
  UseFile("\ndisk.budget_bytes = \"1MiB\"\n");
  EXPECT_THAT(Fail().message(), testing::StartsWith(sources_.file + ":2:21: "));
}

TEST(Settings, KeyEqualsValue) {
  const auto setting = ParseSetting("plans.a=quest{budget = 4}");
  ASSERT_TRUE(setting.ok());
  EXPECT_EQ(setting->first, "plans.a");
  EXPECT_EQ(setting->second, "quest{budget = 4}");
  EXPECT_FALSE(ParseSetting("no equals").ok());
  EXPECT_FALSE(ParseSetting("=x").ok());
}

}  // namespace
}  // namespace kvstrata
