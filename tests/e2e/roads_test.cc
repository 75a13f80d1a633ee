// The linked and the remote road give the same bits: same plans, same inputs, every output
// compared.
#include <cstring>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/disk_slots.h"

namespace kvstrata::testing {
namespace {

struct Step {
  std::vector<float> out, lse;
  std::vector<int32_t> tokens, units;
};

std::vector<int32_t> Selected(const Abi& abi, kvs_step* step, uint32_t group, int what) {
  std::vector<int32_t> ids(4096);
  size_t n = 0;
  EXPECT_EQ(abi.kvs_selection(step, 0, group, what, ids.data(), ids.size(), &n), KVS_OK);
  ids.resize(n);
  return ids;
}

std::vector<Step> Decode(Engine& engine, const char* plan, const std::vector<int32_t>& prompt) {
  const kvs_sequence s = engine.Prefill(plan, prompt);
  EXPECT_NE(s, 0u) << engine.error();
  std::vector<Step> steps;
  for (int t = 0; s != 0 && t < 40; ++t) {
    const std::vector<int32_t> id = {t * 17 + 3};
    kvs_step* step = engine.Begin(s, id);
    EXPECT_NE(step, nullptr) << engine.error();
    if (step == nullptr) return {};
    for (int layer = 0; layer < engine.model().layers; ++layer) {
      Step r;
      r.lse.resize(engine.model().query_heads);
      r.out = engine.Layer(step, layer, id, prompt.size() + t, r.lse.data());
      EXPECT_EQ(engine.code(), KVS_OK) << engine.error();
      uint32_t groups = 0;
      EXPECT_EQ(engine.abi().kvs_selection_groups(step, 0, &groups), KVS_OK);
      for (uint32_t g = 0; g < groups; ++g) {
        for (int32_t x : Selected(engine.abi(), step, g, KVS_TOKENS)) r.tokens.push_back(x);
        for (int32_t x : Selected(engine.abi(), step, g, KVS_UNITS)) r.units.push_back(x);
      }
      steps.push_back(r);
    }
    EXPECT_EQ(engine.abi().kvs_step_end(step, nullptr), KVS_OK) << engine.error();
    const float entropy = static_cast<float>((t * 37 % 11) * 0.2);
    EXPECT_EQ(engine.abi().kvs_report(engine.session(), s, prompt.size() + t, 1, nullptr, &entropy,
                                      nullptr),
              KVS_OK);
  }
  EXPECT_EQ(engine.abi().kvs_sequence_close(engine.session(), s), KVS_OK);
  return steps;
}

class RoadsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(RoadsTest, SameBits) {
  DaemonProcess daemon;
  ToyModel linked_model, remote_model;
  remote_model.digest = "toy-remote";  // no prefix in common: each road computes for itself
  Engine linked(Linked(), daemon.socket(), linked_model);
  Engine remote(Remote(), daemon.socket(), remote_model);
  ASSERT_EQ(linked.code(), KVS_OK) << linked.error();
  ASSERT_EQ(remote.code(), KVS_OK) << remote.error();
  EXPECT_STREQ(Linked().kvs_road(), "linked");
  EXPECT_STREQ(Remote().kvs_road(), "remote");
  const std::vector<int32_t> prompt = Prompt(700, 11);
  const auto a = Decode(linked, GetParam(), prompt), b = Decode(remote, GetParam(), prompt);
  ASSERT_EQ(a.size(), 80u);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].tokens, b[i].tokens) << i;
    ASSERT_EQ(a[i].units, b[i].units) << i;
    ASSERT_EQ(std::memcmp(a[i].out.data(), b[i].out.data(), a[i].out.size() * 4), 0) << i;
    ASSERT_EQ(std::memcmp(a[i].lse.data(), b[i].lse.data(), a[i].lse.size() * 4), 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Plans, RoadsTest,
    ::testing::Values("full", "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
                      "quest{budget = 128, min_tokens = 0}",
                      "chess{page = 16, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, "
                      "rho = [0.6, 0.6, 0.5], thresholds = [0.9, 0.0], min_tokens = 0}"));

// What one road's client left on disk is held by the next daemon on the other, and on its own.
TEST(DiskRoadsTest, BothHoldWhatIsOnDisk) {
  char folder[] = "/tmp/kvstrata-roads.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string tier = std::string(folder) + "/tier";
  const std::vector<std::string> flags = {
      "--set", "disk.path=" + tier,       "--set", "disk.budget_bytes=16MiB",
      "--set", "disk.segment_bytes=1MiB", "--set", "disk.load_timeout=60s"};
  const std::vector<int32_t> prompt = Prompt(325, 4);
  std::vector<Step> want;
  {
    DaemonProcess daemon(flags);
    Engine remote(Remote(), daemon.socket());
    want = Decode(remote, "full", prompt);
    ASSERT_TRUE(Eventually([&] { return DiskSlots(tier).size() >= 20; }));
    daemon.Stop(SIGKILL);
  }
  for (const Abi* abi : {&Remote(), &Linked()}) {
    DaemonProcess daemon(flags);
    Engine engine(*abi, daemon.socket());
    uint32_t held = 0;
    const kvs_sequence s = engine.Open("full", prompt, &held);
    EXPECT_EQ(held, 320u);
    EXPECT_EQ(abi->kvs_sequence_close(engine.session(), s), KVS_OK);
    const std::vector<Step> got = Decode(engine, "full", prompt);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::memcmp(got[i].out.data(), want[i].out.data(), got[i].out.size() * 4), 0) << i;
    }
    daemon.Stop(SIGKILL);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kvstrata::testing
