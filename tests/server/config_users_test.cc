// SPDX-License-Identifier: Apache-2.0
// What a configuration says of users: their limits, and the tenants of the remote tier that they
// are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <string>

#include "server/config/config_keys.h"
#include "tests/server/config_fixture.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;
using ConfigUsersTest = test::ConfigTest;

TEST_F(ConfigUsersTest, LimitsHaveDefaultsAndSharesOfPools) {
  const UserLimitsOptions limits = UserLimitsOf(Load(), 1000, 205);
  EXPECT_EQ(limits.defaults[Limit::kSessions], 512u);
  EXPECT_EQ(limits.defaults[Limit::kAttachesPerSecond], 200u);
  EXPECT_EQ(limits.defaults[Limit::kConnections], 256u);
  EXPECT_EQ(limits.defaults[Limit::kModels], 256u);
  EXPECT_EQ(limits.defaults[Limit::kSequences], 16384u);
  EXPECT_EQ(limits.defaults[Limit::kDeviceBytes], 900u);
  EXPECT_EQ(limits.defaults[Limit::kHostBytes], 184u);
  EXPECT_EQ(limits.defaults[Limit::kQueuedWork], 256u);
  EXPECT_TRUE(limits.operators.contains("uid:0"));
  EXPECT_TRUE(limits.operators.contains("uid:" + std::to_string(geteuid())));
  EXPECT_EQ(Entry(Load(), "limits.host_bytes").value, "90%");
}

TEST_F(ConfigUsersTest, AUserMayHaveLimitsOfItsOwn) {
  UseFile(
      "[limits]\nsessions = 7\nhost_bytes = \"1GiB\"\n"
      "[limits.users.\"uid:1000\"]\nsessions = 5\ndevice_bytes = \"25%\"\n");
  sources_.flags = {{"limits.users.\"uid:1001\".models", "0"}};
  const Config config = Load();
  const UserLimitsOptions limits = UserLimitsOf(config, 400, 400);
  EXPECT_EQ(limits.defaults[Limit::kSessions], 7u);
  EXPECT_EQ(limits.defaults[Limit::kHostBytes], 1u << 30);
  EXPECT_EQ(limits.users.at("uid:1000"),
            (std::map<Limit, uint64_t>{{Limit::kSessions, 5}, {Limit::kDeviceBytes, 100}}));
  EXPECT_EQ(limits.users.at("uid:1001"), (std::map<Limit, uint64_t>{{Limit::kModels, 0}}));
  EXPECT_EQ(Entry(config, "limits.users.uid:1000.sessions").value, "5");
  EXPECT_EQ(Entry(config, "limits.users.uid:1000.sessions").origin, "file");
}

TEST_F(ConfigUsersTest, LimitsOfNobodyAreMistakes) {
  const auto refused = [this](const char* key, const char* value) {
    sources_.flags = {{key, value}};
    const Status status = Fail();
    return std::string(status.reason()) + " " + std::string(status.message());
  };
  for (const char* user : {"1000", "uid:", "uid:x", "uid:007", "uid:4294967295", "default"}) {
    const std::string key = "limits.users." + std::string(user) + ".sessions";
    EXPECT_THAT(refused(key.c_str(), "1"), AllOf(HasSubstr("CONFIG_KEY"), HasSubstr("uid:N")));
  }
  EXPECT_THAT(refused("limits.users.uid:7", "1"), HasSubstr("CONFIG_KEY"));
  EXPECT_THAT(refused("limits.users.uid:7.session", "1"),
              AllOf(HasSubstr("CONFIG_KEY"), HasSubstr("attaches_per_second")));
  EXPECT_THAT(refused("limits.session", "1"), HasSubstr("limits.sessions"));
  EXPECT_THAT(refused("limits.users.uid:7.sessions", "90%"), HasSubstr("CONFIG_VALUE"));
  for (const char* value : {"0%", "101%", "%", "-1", "2PiB"}) {
    EXPECT_THAT(refused("limits.host_bytes", value), HasSubstr("CONFIG_VALUE")) << value;
  }
  EXPECT_THAT(refused("limits.sessions", "5KiB"), HasSubstr("CONFIG_VALUE"));
}

TEST_F(ConfigUsersTest, AUserMayBeATenantOfTheCluster) {
  UseFile(
      "[remote]\ntenant_write_rate = \"1MiB\"\n[remote.tenants]\n\"uid:1000\".name = \"search\"\n"
      "\"uid:1000\".read_rate = \"2MiB\"\n[remote.tenants.\"uid:1001\"]\nname = \"a.B_c-9\"\n");
  sources_.flags = {{"remote.tenants.uid:1002.write_rate", "0"},
                    {"remote.tenants.uid:1001.name", "ads"}};
  const Config config = Load();
  const ClusterTenants& tenants = config.store.cluster_tenants;
  EXPECT_EQ(tenants.NameOf("uid:1000"), "cluster:search");
  EXPECT_EQ(tenants.NameOf("uid:1001"), "cluster:ads") << "a flag wins";
  EXPECT_EQ(tenants.NameOf("uid:1002"), "uid:1002");
  using Rates = TenantRatesOptions;
  EXPECT_EQ(config.remote.pages.searches->tenant_read_rates, (Rates{0, {{"uid:1000", 2 << 20}}}));
  EXPECT_EQ(config.remote.pages.writer.tenant_rates, (Rates{1 << 20, {{"uid:1002", 0}}}));
  EXPECT_FALSE(Entry(config, "remote.tenants.uid:1000.name").reloads);
  EXPECT_TRUE(Entry(config, "remote.tenants.uid:1000.read_rate").reloads);
  EXPECT_EQ(Entry(config, "remote.tenants.uid:1001.name").origin, "flag");
}

TEST_F(ConfigUsersTest, TenantsOfNobodyAndOfTwoAreMistakes) {
  const auto refused = [this](const std::string& key, const std::string& value) {
    sources_.flags = {{"remote.tenants.uid:1.name", "search"}, {key, value}};
    const Status status = Fail();
    return std::string(status.reason()) + " " + std::string(status.message());
  };
  EXPECT_THAT(refused("remote.tenants.uid:2.name", "search"),
              AllOf(HasSubstr("CONFIG_VALUE"), HasSubstr("remote.tenants.uid:2.name"),
                    HasSubstr("uid:1 has it")));
  const std::string longest(64, 'x');
  for (const std::string& name : {std::string(), longest + "x", std::string("a b"),
                                  std::string("a/b"), std::string("cluster:a")}) {
    EXPECT_THAT(refused("remote.tenants.uid:2.name", name),
                AllOf(HasSubstr("CONFIG_VALUE"), HasSubstr("1 to 64")));
  }
  for (const char* key : {"uid:2", "uid:2.names", "1000.name", "uid:007.name", "*.name", ".name",
                          "name", "uid:2.limits.name", ""}) {
    EXPECT_THAT(refused("remote.tenants." + std::string(key), "a"),
                AllOf(HasSubstr("CONFIG_KEY"), HasSubstr("write_rate")));
  }
  for (const char* rate : {"1KiB", "-1", "2PiB", "50%"}) {
    EXPECT_THAT(refused("remote.tenants.uid:2.read_rate", rate), HasSubstr("CONFIG_VALUE"));
  }
  sources_.flags = {{"remote.tenants.uid:2.name", longest}};
  EXPECT_EQ(Load().store.cluster_tenants.NameOf("uid:2"), "cluster:" + longest);
}

TEST_F(ConfigUsersTest, TenantsAreBounded) {
  const auto give = [this](const std::string& key, const std::string& value, uint32_t users) {
    sources_.flags.clear();
    for (uint32_t uid = 0; uid < users; ++uid) {
      const std::string user = "remote.tenants.uid:" + std::to_string(uid);
      sources_.flags.emplace_back(user + key, value + (key == ".name" ? std::to_string(uid) : ""));
    }
  };
  for (const char* key : {".name", ".read_rate", ".write_rate"}) {
    const std::string value = key == std::string(".name") ? "tenant-" : "1MiB";
    give(key, value, 1024);
    (void)Load();
    give(key, value, 1025);
    EXPECT_THAT(Fail().message(), HasSubstr("at most 1024 users")) << key;
  }
}

}  // namespace
}  // namespace kvstrata
