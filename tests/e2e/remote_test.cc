// SPDX-License-Identifier: Apache-2.0
// Two real daemons with disks of their own, and a real redis-server between them: what one computed
// the other opens, with the same bits; when the server is gone there are misses only.
#include <fstream>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/redis_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr uint32_t kPrompt = 40 * kPage + 5;
constexpr uint32_t kUsable = kPrompt / kPage * kPage;
constexpr int kPatienceMs = 60'000;

using Outputs = std::vector<std::vector<float>>;

struct RemoteCase {
  const char* name;
  const char* plan;
  const char* write;
  bool artefact;
};
const RemoteCase kCases[] = {
    {"Quest", "quest{min_tokens = 0, budget = 128}", "all", false},
    {"Chess", "chess{min_tokens = 0}", "all", false},
    {"MosaickvWithoutRawPages",
     "mosaickv{max_loss = 1, min_tokens = 0, segment = 256, buffer = 16, keep_raw = \"no\"}",
     "reused", true},
    {"PlanesWithoutRawPages", "strata{min_tokens = 0, keep_raw = \"no\"}", "reused", true},
};

class RemoteTest : public ::testing::TestWithParam<RemoteCase> {
 protected:
  RemoteTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }

  std::string secret() const { return folder_ / "secret"; }
  // A node with a disk of its own. Deadlines are none of a test's business, unless one says so.
  std::unique_ptr<DaemonProcess> Start(const std::string& node, const RedisProcess& redis,
                                       const std::string& deadline = "60s") const {
    std::vector<std::string> flags;
    for (const std::string& setting :
         {"disk.path=" + folder_ / node, std::string("disk.budget_bytes=32MiB"),
          std::string("disk.segment_bytes=4MiB"), std::string("disk.load_timeout=60s"),
          "remote.redis=" + redis.address(), "remote.secret_file=" + secret(),
          std::string("remote.write=") + GetParam().write, "remote.deadline=" + deadline,
          "remote.deadline_most=" + deadline}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    return std::make_unique<DaemonProcess>(flags);
  }
  // Opens the prompt, computes what is not held, and decodes; the outputs of decoded tokens.
  Outputs Serve(const std::string& socket, uint32_t* held) const {
    Engine engine(Linked(), socket);
    const std::vector<int32_t> ids = Prompt(kPrompt, 11);
    const kvs_sequence s = engine.Open(GetParam().plan, ids, held);
    EXPECT_NE(s, 0u) << engine.error();
    engine.Run(s, {ids.begin() + *held, ids.end()}, *held);
    EXPECT_EQ(Linked().kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    EXPECT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    Outputs all;
    for (int32_t i = 0; i < 8; ++i) {
      for (auto& out : engine.Run(s, {500 + i}, kPrompt + static_cast<uint32_t>(i))) {
        all.push_back(std::move(out));
      }
    }
    EXPECT_EQ(engine.code(), KVS_OK) << engine.error();
    Operator admin(socket);
    EXPECT_TRUE(Eventually(
        [&] {
          const auto status = admin.Status();
          return status.disks(0).waiting() == 0 && status.remotes(0).waiting() == 0;
        },
        kPatienceMs));
    EXPECT_EQ(admin.Audit(), "");
    return all;
  }

  const ScratchDir folder_;
};

TEST_P(RemoteTest, WhatOneComputedTheOtherOpens) {
  const RedisProcess redis;
  const auto a = Start("a", redis), b = Start("b", redis);
  uint32_t held = 1;
  const Outputs want = Serve(a->socket(), &held);
  EXPECT_EQ(held, 0u);
  const auto written = Operator(a->socket()).Status().remotes(0);
  EXPECT_GT(written.written(), 0u);
  EXPECT_EQ(written.failed(), 0u);
  EXPECT_EQ(Serve(b->socket(), &held), want);
  EXPECT_EQ(held, kUsable);
  const auto status = Operator(b->socket()).Status();
  EXPECT_GT(status.remotes(0).read(), 0u);
  EXPECT_EQ(status.remotes(0).missed(), 0u);
  EXPECT_EQ(status.remotes(0).illness(), "");
  EXPECT_EQ(status.artefact_hits(), GetParam().artefact ? 1u : 0u);
  EXPECT_GT(status.disks(0).written(), 0u) << "what came is offered to the disk";
}

TEST_P(RemoteTest, WithoutItsServerThereAreMissesOnly) {
  RedisProcess redis;
  const auto a = Start("a", redis);
  uint32_t held = 0;
  const Outputs want = Serve(a->socket(), &held);
  redis.Kill();
  const auto b = Start("b", redis, "100ms");
  EXPECT_EQ(Serve(b->socket(), &held), want);
  EXPECT_EQ(held, 0u);
  Operator admin(b->socket());
  EXPECT_TRUE(Eventually([&] { return admin.Status().remotes(0).illness() != ""; }, kPatienceMs));
  EXPECT_TRUE(
      Eventually([&] { return admin.Status().health().starts_with("degraded"); }, kPatienceMs));
}

INSTANTIATE_TEST_SUITE_P(Plans, RemoteTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace kvstrata::testing
