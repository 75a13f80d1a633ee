// SPDX-License-Identifier: Apache-2.0
// What values of single keys mean, and which are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/config_fixture.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;
using ConfigValuesTest = test::ConfigTest;

TEST_F(ConfigValuesTest, MistakesNameTheUnits) {
  sources_.flags = {{"pool.host_bytes", "4G"}};
  EXPECT_THAT(Fail().message(), HasSubstr("KiB, MiB, GiB, TiB"));
  sources_.flags = {{"disk.load_timeout", "5"}};
  EXPECT_THAT(Fail().message(), HasSubstr("us, ms, s, m (or min), h or d"));
  sources_.flags = {{"limits.users.uid:7.host_bytes", "4G"}};
  EXPECT_THAT(Fail().message(), HasSubstr("KiB, MiB, GiB, TiB"));
}

TEST_F(ConfigValuesTest, CpuLists) {
  const auto cpus = [this](const char* text) {
    sources_.flags = {{"work.cpus", text}};
    const Result<Config> config = LoadConfig(sources_);
    return config.ok() ? config->work.cpus : std::vector<int>{-1};
  };
  EXPECT_EQ(cpus(""), std::vector<int>());
  EXPECT_EQ(cpus("5"), std::vector<int>({5}));
  EXPECT_EQ(cpus("0-2,6"), std::vector<int>({0, 1, 2, 6}));
  for (const char* wrong : {",", "1,", ",1", "-", "1-", "-1", "a", "1-2-3", "1024", "0 1"}) {
    EXPECT_EQ(cpus(wrong), std::vector<int>({-1})) << wrong;
  }
}

TEST_F(ConfigValuesTest, PoolDevices) {
  const std::string one = "GPU-01234567-0123-0123-0123-0123456789ab";
  const std::string other = "GPU-01234567-0123-0123-0123-0123456789ac";
  const auto devices = [this](const std::string& text) {
    sources_.flags = {{"pool.device", text}};
    return Load().devices;
  };
  EXPECT_EQ(devices("emulated").emulated, 1u);
  EXPECT_EQ(devices("emulated:3").emulated, 3u);
  EXPECT_EQ(devices("emulated:64").emulated, 64u);
  EXPECT_EQ(devices("cuda").emulated, 0u);
  EXPECT_TRUE(devices("cuda").uuids.empty());
  EXPECT_EQ(devices(one).uuids, std::vector<std::string>{one});
  EXPECT_EQ(devices(other + "," + one).uuids, (std::vector<std::string>{other, one}));
  for (const std::string& wrong :
       {std::string("emulated:0"), std::string("emulated:65"), std::string("emulated:"),
        std::string("emulated2"), one + ",", "," + one, one + "," + one, one + ", " + other}) {
    SCOPED_TRACE(wrong);
    sources_.flags = {{"pool.device", wrong}};
    EXPECT_THAT(Fail().message(), HasSubstr("pool.device"));
  }
}

TEST_F(ConfigValuesTest, HttpIsServedOnLoopbackOnly) {
  for (const char* listen : {"0.0.0.0:9465", "[::]:9465", "10.0.0.1:9465", "localhost:9465"}) {
    sources_.flags = {{"http.listen", listen}};
    const Status status = Fail();
    EXPECT_EQ(status.reason(), "HTTP_LISTEN") << listen;
    EXPECT_THAT(status.message(), HasSubstr("flag: http.listen"));
    EXPECT_THAT(status.message(), HasSubstr("allowed: 127.0.0.1:PORT"));
  }
  for (const char* listen : {"9465", "unix:http.sock", "127.0.0.1:99999", "127.0.0.1:"}) {
    sources_.flags = {{"http.listen", listen}};
    EXPECT_EQ(Fail().reason(), "CONFIG_VALUE") << listen;
  }
}

TEST_F(ConfigValuesTest, TomlTypes) {
  UseFile("session.max = 7\npool.device_bytes = 67108864\ndebug.coredump = true\n");
  const Config config = Load();
  EXPECT_EQ(config.store.max_sessions, 7u);
  EXPECT_EQ(config.store.device_bytes, uint64_t{64} << 20);
  EXPECT_TRUE(config.coredump);
  UseFile("socket.path = 7\n");
  EXPECT_THAT(Fail().message(), HasSubstr("socket.path = '7'"));
  UseFile("session.max = 7.5\n");
  EXPECT_THAT(Fail().message(), HasSubstr("session.max = '7.5'"));
  UseFile("session.max = [7]\n");
  EXPECT_THAT(Fail().message(), HasSubstr("session.max"));
}

TEST_F(ConfigValuesTest, LogLevelsAsTheyArePrinted) {
  sources_.flags = {{"log.level", "warning"}};
  EXPECT_EQ(Load().log_level, LogLevel::kWarn);
}

TEST_F(ConfigValuesTest, NamedPlans) {
  UseFile(
      "[plans]\n"
      "short = \"quest{budget = 512}\"\n"
      "[plans.long]\npreset = \"quest\"\nbudget = 4096\n"
      "[plans.plain]\npreset = \"full\"\n"
      "[plans.own]\nsegmenter = \"hierarchy\"\nselector = \"cascade\"\nrho = [0.5, 0.2, 0.1]\n");
  const Config config = Load();
  ASSERT_EQ(config.store.named_plans.size(), 4u);
  for (const auto& [name, text] : config.store.named_plans) {
    EXPECT_TRUE(ParsePlan(text).ok()) << name << " = " << text;
    EXPECT_EQ(Entry(config, "plans." + name).value, text);
  }
  EXPECT_EQ(ParsePlan(config.store.named_plans[0].second)->minmax.budget, 4096);
  EXPECT_EQ(ParsePlan(config.store.named_plans[3].second)->minmax.budget, 512);
  EXPECT_EQ(ParsePlan(config.store.named_plans[1].second)->selector, SelectorKind::kCascade);
}

TEST_F(ConfigValuesTest, BadPlansNameTheirKey) {
  UseFile("[plans.bad]\npreset = \"quest\"\nbudgte = 4096\n");
  EXPECT_THAT(Fail().message(), HasSubstr("plans.bad"));
  EXPECT_THAT(Fail().message(), HasSubstr("k.toml:1:"));
  EXPECT_EQ(Fail().reason(), "PLAN_OPTION_UNKNOWN");
  UseFile("plans.quest = \"full\"\n");
  EXPECT_THAT(Fail().message(), HasSubstr("no preset's name"));
  UseFile("plans.\"a b\" = \"full\"\n");
  EXPECT_THAT(Fail().message(), HasSubstr("plan name 'a b'"));
  sources_.file.clear();
  sources_.flags = {{"plans.x", "ches"}};
  EXPECT_THAT(Fail().message(), HasSubstr("plans.x = 'ches'"));
}

TEST_F(ConfigValuesTest, SocketPathMustFit) {
  sources_.flags = {{"socket.path", "/tmp/" + std::string(95, 'x')}};
  EXPECT_TRUE(LoadConfig(sources_).ok());
  sources_.flags = {{"socket.path", "/tmp/" + std::string(96, 'x')}};
  EXPECT_THAT(Fail().message(), HasSubstr("101 bytes; at most 100"));
  EXPECT_THAT(Fail().message(), HasSubstr("107"));
}

}  // namespace
}  // namespace kvstrata
