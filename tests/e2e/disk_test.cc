// SPDX-License-Identifier: Apache-2.0
// Prefixes that outlive their daemon: a real daemon with a disk folder ends, by SIGTERM or SIGKILL,
// and the next one on the same folder holds the prompt, with the same bits.
#include <cstring>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr uint32_t kPrompt = 40 * kPage + 5;

using Outputs = std::vector<std::vector<float>>;

bool SameBits(const Outputs& a, const Outputs& b) {
  if (a.size() != b.size() || a.empty()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    if (std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

struct DiskCase {
  const char* name;
  const char* plan;
  int signal;
};

class DiskTest : public ::testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> Start() const {
    // The deadline is none of a test's business: a busy machine may take its time.
    return std::make_unique<DaemonProcess>(std::vector<std::string>{
        "--set", "disk.path=" + tier(), "--set", "disk.budget_bytes=16MiB", "--set",
        "disk.segment_bytes=1MiB", "--set", "disk.load_timeout=60s"});
  }
  std::string tier() const { return folder_ / "tier"; }

  // Opens the prompt, computes what is not held, decodes 12 tokens: the outputs of those.
  static Outputs Decode(Engine& engine, const char* plan, uint32_t* held) {
    std::vector<int32_t> ids = Prompt(kPrompt, 11);
    const kvs_sequence s = engine.Open(plan, ids, held);
    EXPECT_NE(s, 0u) << engine.error();
    engine.Run(s, {ids.begin() + *held, ids.end()}, *held);
    EXPECT_EQ(engine.code(), KVS_OK) << engine.error();
    EXPECT_EQ(Linked().kvs_prefill_done(engine.session(), s), KVS_OK);
    Outputs all;
    for (int32_t i = 0; i < 12; ++i) {
      for (auto& out : engine.Run(s, {500 + i}, kPrompt + static_cast<uint32_t>(i))) {
        all.push_back(std::move(out));
      }
      EXPECT_EQ(engine.code(), KVS_OK) << engine.error();
    }
    return all;
  }

  const ScratchDir folder_;
};

class DiskRestartTest : public DiskTest, public ::testing::WithParamInterface<DiskCase> {};

TEST_P(DiskRestartTest, TheNextDaemonHoldsThePromptBitForBit) {
  const auto [name, plan, signal] = GetParam();
  Outputs want;
  uint32_t held = 0;
  size_t slots = 0;
  {
    const auto daemon = Start();
    Engine engine(Linked(), daemon->socket());
    want = Decode(engine, plan, &held);
    EXPECT_EQ(held, 0u);
    ASSERT_TRUE(Eventually([&] { return DiskSlots(tier()).size() >= kPrompt / kPage; }));
    EXPECT_EQ(Operator(daemon->socket()).Audit(), "");
    const int status = daemon->Stop(signal);
    EXPECT_TRUE(signal == SIGKILL || status == 0) << status;
    slots = DiskSlots(tier()).size();
  }
  {
    const auto daemon = Start();
    Engine engine(Linked(), daemon->socket());
    const Outputs got = Decode(engine, plan, &held);
    EXPECT_EQ(held, kPrompt / kPage * kPage);
    EXPECT_TRUE(SameBits(got, want));
    EXPECT_EQ(Operator(daemon->socket()).Audit(), "");
    const auto disk = Operator(daemon->socket()).Status().disks(0);
    EXPECT_EQ(disk.path(), tier());
    EXPECT_GE(disk.entries(), kPrompt / kPage);
    EXPECT_GE(disk.used_bytes(), disk.entries() * 8192);
    EXPECT_GE(disk.read(), kPrompt / kPage);
    EXPECT_EQ(disk.corrupt(), 0u);
    daemon->Stop(SIGKILL);
  }
  // One byte of the fifth page that was written: the prefix ends there, and what follows is right.
  FlipByte(DiskSlots(tier()).at(4));
  const auto daemon = Start();
  Engine engine(Linked(), daemon->socket());
  const Outputs got = Decode(engine, plan, &held);
  EXPECT_EQ(held, 4 * kPage);
  EXPECT_TRUE(SameBits(got, want));
  EXPECT_EQ(Operator(daemon->socket()).Audit(), "");
  ASSERT_TRUE(Eventually([&] { return DiskSlots(tier()).size() >= slots; })) << "written again";
}

INSTANTIATE_TEST_SUITE_P(
    Plans, DiskRestartTest,
    ::testing::Values(DiskCase{"FullKilled", "full", SIGKILL},
                      DiskCase{"FullStopped", "full", SIGTERM},
                      DiskCase{"QuestKilled", "quest{min_tokens = 0, budget = 128}", SIGKILL},
                      DiskCase{"QuestStopped", "quest{min_tokens = 0, budget = 128}", SIGTERM},
                      DiskCase{"ChessKilled", "chess{min_tokens = 0}", SIGKILL}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_F(DiskTest, APinOutlivesItsClientAndItsDaemon) {
  const uint32_t pages = kPrompt / kPage;
  uint32_t held = 0;
  {
    const auto daemon = Start();
    Operator op(daemon->socket());
    {
      Engine engine(Linked(), daemon->socket());
      const kvs_sequence s = engine.Prefill("full", Prompt(kPrompt, 11));
      ASSERT_NE(s, 0u) << engine.error();
      ASSERT_TRUE(Eventually([&] { return op.Status().disks(0).entries() >= pages; }));
      EXPECT_EQ(op.Pin(s, std::chrono::hours(1)).pages(), pages);
      op.Pin(s, std::chrono::milliseconds(1));
      ASSERT_TRUE(Eventually([&] { return op.Pins().pins_size() == 1; })) << "it expires by itself";
    }
    EXPECT_EQ(op.Evict().pages(), 0u);
    EXPECT_EQ(op.Pins().pins(0).device_pages(), pages) << "without its client";
    EXPECT_EQ(op.Audit(), "");
    daemon->Stop(SIGKILL);
  }
  {
    const auto daemon = Start();
    Operator op(daemon->socket());
    ASSERT_EQ(op.Pins().pins_size(), 1);
    const v1::PinnedPrefix pin = op.Pins().pins(0);
    EXPECT_EQ(pin.disk_pages(), pages);
    EXPECT_EQ(pin.tokens(), pages * kPage);
    EXPECT_GT(pin.ttl_left_us(), 0u);
    EXPECT_LT(pin.ttl_left_us(), 3600'000'000u);
    {
      Engine engine(Linked(), daemon->socket());
      ASSERT_NE(engine.Open("full", Prompt(kPrompt, 11), &held), 0u) << engine.error();
      EXPECT_EQ(held, pages * kPage);
    }
    ASSERT_TRUE(Eventually([&] { return op.Status().sessions() == 0; }));
    EXPECT_EQ(op.Evict().pages(), 0u);
    op.Unpin(pin.pin());
    EXPECT_EQ(op.Evict().pages(), pages);
    EXPECT_EQ(op.Audit(), "");
    daemon->Stop(SIGKILL);
  }
  const auto daemon = Start();
  EXPECT_EQ(Operator(daemon->socket()).Pins().pins_size(), 0);
}

TEST_F(DiskTest, TwoEnginesOpenAtOnce) {
  uint32_t held = 0;
  {
    const auto daemon = Start();
    Engine engine(Linked(), daemon->socket());
    Decode(engine, "full", &held);
    ASSERT_TRUE(Eventually([&] { return DiskSlots(tier()).size() >= kPrompt / kPage; }));
    daemon->Stop(SIGKILL);
  }
  const auto daemon = Start();
  Engine first(Linked(), daemon->socket()), second(Linked(), daemon->socket());
  uint32_t first_held = 0, second_held = 0;
  std::thread other([&] { second.Open("full", Prompt(kPrompt, 11), &second_held); });
  first.Open("full", Prompt(kPrompt, 11), &first_held);
  other.join();
  EXPECT_EQ(first_held, kPrompt / kPage * kPage);
  EXPECT_EQ(second_held, first_held);
  EXPECT_EQ(Operator(daemon->socket()).Audit(), "");
}

}  // namespace
}  // namespace kvstrata::testing
