// SPDX-License-Identifier: Apache-2.0
// Prompts that open on their upper planes, while a real disk or a real redis-server brings the
// others: real daemons, of which some are killed in between, and a proxy that holds the others
// back.
#include <fstream>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/redis_process.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/holding_proxy.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr uint32_t kPrompt = 40 * kPage + 5;  // 10 groups: extents of 8, 1 and 1
constexpr uint32_t kPacked = 640;
constexpr int kPatienceMs = 60'000;
constexpr const char* kWaits = "strata{min_tokens = 0, keep_raw = \"no\", sample = 2}";
constexpr const char* kOpensOnUpper =
    "strata{min_tokens = 0, keep_raw = \"no\", sample = 2, open_on = \"upper\"}";
// Between 8 groups of upper runs and 8 groups of lower ones, of the toy model's 4 (layer, KV head).
constexpr size_t kAllUpperAndNoLower = 120'000;

constexpr uint16_t kLowerPlanes = 6;

using Outputs = std::vector<std::vector<float>>;

class OpenOnUpperTest : public ::testing::Test {
 protected:
  OpenOnUpperTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }

  std::string secret() const { return folder_ / "secret"; }
  std::string tier(const std::string& node) const { return folder_ / node; }
  // A node with a disk of its own; redis: where its remote tier is, "": nowhere. No test here waits
  // for a deadline.
  std::unique_ptr<DaemonProcess> Start(const std::string& node,
                                       const std::string& redis = "") const {
    std::vector<std::string> settings = {"disk.path=" + tier(node), "disk.budget_bytes=32MiB",
                                         "disk.segment_bytes=4MiB", "disk.load_timeout=60s"};
    if (!redis.empty()) {
      settings.insert(settings.end(),
                      {"remote.redis=" + redis, "remote.secret_file=" + secret(),
                       "remote.write=all", "remote.deadline=60s", "remote.deadline_most=60s"});
    }
    std::vector<std::string> flags;
    for (const std::string& setting : settings) flags.insert(flags.end(), {"--set", setting});
    return std::make_unique<DaemonProcess>(flags);
  }
  // A daemon packs the prompt, writes it, and is killed.
  void Write(const char* plan, const std::string& redis = "") const {
    const auto daemon = Start("one", redis);
    Engine engine(Linked(), daemon->socket());
    const kvs_sequence s = engine.Prefill(plan, Prompt(kPrompt, 11));
    ASSERT_NE(s, 0u) << engine.error();
    ASSERT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    Operator admin(daemon->socket());
    ASSERT_TRUE(Eventually(
        [&] {
          const auto status = admin.Status();
          return status.disks(0).waiting() == 0 &&
                 (redis.empty() || status.remotes(0).waiting() == 0);
        },
        kPatienceMs));
    daemon->Stop(SIGKILL);
  }
  static kvs_sequence Open(Engine* engine, const char* plan) {
    uint32_t held = 0;
    const kvs_sequence s = engine->Open(plan, Prompt(kPrompt, 11), &held);
    EXPECT_NE(s, 0u) << engine->error();
    EXPECT_EQ(held, kPacked);
    return s;
  }
  // The end of the prompt and some decoded tokens.
  static Outputs Decode(Engine* engine, kvs_sequence s, uint32_t tokens = 8) {
    const std::vector<int32_t> ids = Prompt(kPrompt, 11);
    Outputs all = engine->Run(s, {ids.begin() + kPacked, ids.end()}, kPacked);
    EXPECT_EQ(engine->abi().kvs_prefill_done(engine->session(), s), KVS_OK) << engine->error();
    for (uint32_t i = 0; i < tokens; ++i) {
      for (auto& out : engine->Run(s, {500 + static_cast<int32_t>(i)}, kPrompt + i)) {
        all.push_back(std::move(out));
      }
    }
    EXPECT_EQ(engine->code(), KVS_OK) << engine->error();
    return all;
  }
  static std::string StatusOf(Engine* engine, kvs_sequence s) {
    char status[256];
    EXPECT_EQ(engine->abi().kvs_sequence_status(engine->session(), s, status, sizeof(status)),
              KVS_OK);
    return status;
  }
  // What a sequence answers that waited for everything.
  Outputs Whole(const char* plan, const std::string& redis = "") const {
    const auto daemon = Start("one", redis);
    Engine engine(Linked(), daemon->socket());
    const kvs_sequence s = Open(&engine, plan);
    EXPECT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    Outputs all = Decode(&engine, s);
    daemon->Stop(SIGKILL);
    return all;
  }

  const ScratchDir folder_;
};

// From the disk, after a kill; settle waits for what is on its way.
TEST_F(OpenOnUpperTest, OnceAllHasComeStepsAreThoseOfASequenceThatWaited) {
  Write(kWaits);
  const Outputs want = Whole(kWaits);
  ASSERT_FALSE(want.empty());
  std::filesystem::remove_all(tier("one"));
  Write(kOpensOnUpper);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Whole(kOpensOnUpper), want);
  }
  const auto daemon = Start("one");
  Engine engine(Linked(), daemon->socket());
  const kvs_sequence s = Open(&engine, kOpensOnUpper);
  ASSERT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
  Operator admin(daemon->socket());
  const auto shown = admin.Show(s);
  EXPECT_EQ(shown.sequence().arriving(), "");
  EXPECT_EQ(shown.extents_size(), 6);
  EXPECT_EQ(admin.Status().artefact_hits(), 1u);
  EXPECT_EQ(admin.Audit(), "");
}

// On either transport, and after a daemon was killed that waited.
class HeldBackTest : public OpenOnUpperTest, public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(Transports, HeldBackTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Linked" : "Remote"; });

TEST_P(HeldBackTest, IsAttendedCoarselyAndThenFinely) {
  const Abi& abi = GetParam() ? Linked() : Remote();
  const RedisProcess redis;
  Write(kOpensOnUpper, redis.address());
  const Outputs want = Whole(kOpensOnUpper, redis.address());
  HoldingProxy proxy(redis.port(), kAllUpperAndNoLower);
  const std::string through = "127.0.0.1:" + std::to_string(proxy.port());
  {
    const auto daemon = Start("two", through);
    Engine engine(abi, daemon->socket());
    Open(&engine, kOpensOnUpper);
    EXPECT_TRUE(Eventually([&] { return proxy.held(); }, kPatienceMs));
    daemon->Stop(SIGKILL);
  }
  const auto daemon = Start("two", through);
  Operator admin(daemon->socket());
  Engine engine(abi, daemon->socket());
  const kvs_sequence s = Open(&engine, kOpensOnUpper);
  const std::string text =
      "the lower planes of 640 packed tokens are on their way from a tier: attends their upper "
      "planes";
  EXPECT_EQ(admin.Show(s).sequence().arriving(), text);
  EXPECT_EQ(admin.Show(s).extents_size(), 3);
  kvs_sequence fork = 0;
  ASSERT_EQ(abi.kvs_sequence_fork(engine.session(), s, &fork), KVS_OK) << engine.error();
  EXPECT_EQ(admin.Show(fork).sequence().arriving(), text);
  EXPECT_NE(Decode(&engine, s), want);
  EXPECT_NE(StatusOf(&engine, s).find(text), std::string::npos) << StatusOf(&engine, s);
  EXPECT_EQ(admin.Status().disks(0).written(), 0u) << "half of an artefact";
  EXPECT_EQ(admin.Audit(), "");
  proxy.Release();
  for (const kvs_sequence each : {s, fork}) {
    ASSERT_EQ(abi.kvs_settle(engine.session(), each), KVS_OK) << engine.error();
    EXPECT_EQ(admin.Show(each).sequence().arriving(), "");
    EXPECT_EQ(admin.Show(each).extents_size(), 6);
  }
  EXPECT_EQ(StatusOf(&engine, s), "ok");
  EXPECT_EQ(Decode(&engine, fork), want);
  EXPECT_EQ(Decode(&engine, Open(&engine, kOpensOnUpper)), want);
  EXPECT_TRUE(Eventually([&] { return admin.Status().disks(0).written() > 0; }, kPatienceMs));
  EXPECT_EQ(admin.Audit(), "");
}

// It serves the next one, as an artefact that was read whole.
TEST_F(OpenOnUpperTest, WhatASessionThatEndedHadAskedForIsKept) {
  const RedisProcess redis;
  Write(kOpensOnUpper, redis.address());
  HoldingProxy proxy(redis.port(), kAllUpperAndNoLower);
  const auto daemon = Start("two", "127.0.0.1:" + std::to_string(proxy.port()));
  Operator admin(daemon->socket());
  {
    Engine engine(Linked(), daemon->socket());
    Open(&engine, kOpensOnUpper);
    EXPECT_TRUE(Eventually([&] { return proxy.held(); }, kPatienceMs));
  }
  EXPECT_EQ(admin.Audit(), "");
  proxy.Release();
  EXPECT_TRUE(Eventually([&] { return admin.UsedBytes() == 0; }, kPatienceMs));
  Engine engine(Linked(), daemon->socket());
  const kvs_sequence s = Open(&engine, kOpensOnUpper);
  EXPECT_EQ(admin.Show(s).sequence().arriving(), "");
  EXPECT_EQ(admin.Show(s).extents_size(), 6);
  EXPECT_EQ(admin.Audit(), "");
}

TEST_F(OpenOnUpperTest, WithoutTheRestStepsSayThatItIsLost) {
  RedisProcess redis;
  Write(kOpensOnUpper, redis.address());
  HoldingProxy proxy(redis.port(), kAllUpperAndNoLower);
  const auto daemon = Start("two", "127.0.0.1:" + std::to_string(proxy.port()));
  Operator admin(daemon->socket());
  Engine engine(Linked(), daemon->socket());
  const kvs_sequence s = Open(&engine, kOpensOnUpper);
  EXPECT_NE(admin.Show(s).sequence().arriving(), "");
  EXPECT_TRUE(Eventually([&] { return proxy.held(); }, kPatienceMs));
  redis.Kill();
  EXPECT_NE(Linked().kvs_settle(engine.session(), s), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "REST_LOST");
  EXPECT_EQ(engine.Begin(s, {500}), nullptr);
  EXPECT_STREQ(Linked().kvs_error_reason(), "REST_LOST");
  EXPECT_TRUE(admin.Show(s).sequence().arriving().starts_with("DATA_LOSS REST_LOST"))
      << admin.Show(s).sequence().arriving();
  EXPECT_EQ(admin.Audit(), "");
  // Closed and opened again it is computed.
  ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), s), KVS_OK) << engine.error();
  std::vector<int32_t> ids = Prompt(kPrompt, 11);
  uint32_t held = 1;
  const kvs_sequence again = engine.Open(kOpensOnUpper, ids, &held);
  ASSERT_NE(again, 0u) << engine.error();
  EXPECT_EQ(held, 0u);
  EXPECT_EQ(admin.Audit(), "");
}

// As in an extent's header (docs/extents.md).
uint16_t KindIn(const DiskSlot& slot) {
  std::ifstream file(slot.file, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(slot.offset + 4096 + 6));
  uint16_t kind = 0;
  file.read(reinterpret_cast<char*>(&kind), sizeof(kind));
  return kind;
}

// What is damaged on disk is found when it comes.
TEST_F(OpenOnUpperTest, DamagedLowerPlanesAreLost) {
  Write(kOpensOnUpper);
  std::vector<DiskSlot> slots = DiskSlots(tier("one"));
  std::erase_if(slots, [](const DiskSlot& slot) { return !slot.payload.starts_with("KVEX"); });
  ASSERT_EQ(slots.size(), 6u);
  const auto lower = std::ranges::find(slots, kLowerPlanes, KindIn);
  ASSERT_NE(lower, slots.end());
  FlipByte(*lower);
  const auto daemon = Start("one");
  Engine engine(Linked(), daemon->socket());
  const kvs_sequence s = Open(&engine, kOpensOnUpper);
  EXPECT_NE(Linked().kvs_settle(engine.session(), s), KVS_OK);
  EXPECT_STREQ(Linked().kvs_error_reason(), "REST_LOST");
  EXPECT_EQ(engine.Begin(s, {500}), nullptr);
  EXPECT_STREQ(Linked().kvs_error_reason(), "REST_LOST");
  EXPECT_EQ(Operator(daemon->socket()).Audit(), "");
}

}  // namespace
}  // namespace kvstrata::testing
