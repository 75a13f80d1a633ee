// SPDX-License-Identifier: Apache-2.0
// kill -9 under load, again and again, on one disk folder: every daemon finds a sound tier, and
// what engines decode from its prefixes is right. The moment of a kill is a random number of pieces
// of work after the start, in the middle of what two engines do.
//   KVS_KILL_CYCLES=200 disk_kill_test
#include <atomic>
#include <cstdlib>
#include <random>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr int kPrompts = 24, kEngines = 2;  // more than the folder holds, so that it evicts, too
const char* const kPlans[] = {"full", "quest{min_tokens = 0, budget = 100000}"};

int Cycles() {
  const char* given = std::getenv("KVS_KILL_CYCLES");
  return given == nullptr ? 10 : std::max(std::atoi(given), 1);
}

// Prompts of one family of three begin alike.
std::vector<int32_t> PromptOf(int i) {
  std::vector<int32_t> ids = Prompt(static_cast<uint32_t>(20 + i) * kPage + 3, 100 + i / 3);
  const size_t common = ids.size() / 2;
  for (size_t t = common; t < ids.size(); ++t) ids[t] = (ids[t] + i) % 50021;
  return ids;
}

struct Load {
  std::atomic<int> pieces{0};  // prompts and decode steps that were answered
  std::atomic<bool> killed{false};
  std::atomic<int> wrong{0};
};

// Prompts in random order until the daemon dies.
void Drive(const std::string& socket, uint64_t seed, Load* load) {
  std::mt19937_64 random(seed);
  Engine engine(Linked(), socket);
  while (engine.code() == KVS_OK && !load->killed) {
    std::vector<int32_t> ids = PromptOf(static_cast<int>(random() % kPrompts));
    uint32_t held = 0;
    const kvs_sequence s = engine.Open(kPlans[random() % 2], ids, &held);
    if (s == 0) break;
    engine.Run(s, {ids.begin() + held, ids.end()}, held);
    if (engine.code() != KVS_OK || Linked().kvs_prefill_done(engine.session(), s) != KVS_OK) break;
    ++load->pieces;
    for (int i = 0; i < 2 && engine.code() == KVS_OK; ++i, ++load->pieces) {
      const ::testing::AssertionResult right =
          engine.DecodesRight(s, &ids, static_cast<int32_t>(random() % 50021));
      if (!right && engine.code() == KVS_OK) {
        ++load->wrong;
        std::fprintf(stderr, "seed %lu: %s\n", seed, right.message());
      }
    }
    if (engine.code() == KVS_OK) Linked().kvs_sequence_close(engine.session(), s);
  }
}

TEST(DiskKillTest, EveryDaemonFindsASoundTier) {
  const ScratchDir folder;
  const std::string tier = folder / "tier";
  const uint64_t seed = std::random_device{}();
  std::printf("seed %lu, %d cycles\n", seed, Cycles());
  std::mt19937_64 random(seed);
  uint64_t loaded = 0, pieces = 0;
  for (int cycle = 0; cycle < Cycles() && !::testing::Test::HasFailure(); ++cycle) {
    SCOPED_TRACE(cycle);
    DaemonProcess daemon({"--set", "disk.path=" + tier, "--set", "disk.budget_bytes=8MiB", "--set",
                          "disk.segment_bytes=1MiB", "--set", "disk.load_timeout=60s"});
    EXPECT_EQ(Operator(daemon.socket()).Audit(), "");
    Load load;
    std::vector<std::thread> engines;
    for (int i = 0; i < kEngines; ++i) {
      engines.emplace_back(Drive, daemon.socket(), random(), &load);
    }
    const int enough = 1 + static_cast<int>(random() % 12);
    EXPECT_TRUE(Eventually([&] { return load.pieces >= enough; }, 60000));
    const auto disk = Operator(daemon.socket()).Status().disks(0);
    EXPECT_EQ(disk.corrupt(), 0u);
    load.killed = true;
    daemon.Stop(SIGKILL);
    for (std::thread& engine : engines) engine.join();
    EXPECT_EQ(load.wrong, 0);
    loaded += disk.read();
    pieces += static_cast<uint64_t>(load.pieces);
  }
  std::printf("%lu pages came from disk, %lu pieces of work\n", loaded, pieces);
  EXPECT_TRUE(loaded > 0 || Cycles() < 5);
}

}  // namespace
}  // namespace kvstrata::testing
