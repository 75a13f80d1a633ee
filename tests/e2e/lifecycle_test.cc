// SPDX-License-Identifier: Apache-2.0
// A real daemon and real client processes: decode, fork, share, and every way to die.
#include <sys/resource.h>

#include <cstring>
#include <set>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::testing {
namespace {

const char* const kPlans[] = {"full", "window", "quest", "chess"};

// --- client roles -------------------------------------------------------------------------------

// Opens a sequence, writes half of a step's layers, says 'w', and waits to be killed.
const bool kMidWrite = RegisterRole("mid-write", [](const std::string& socket, int seed) {
  Engine engine(Linked(), socket);
  const kvs_sequence s = engine.Prefill("full", Prompt(40, seed));
  kvs_step* step = engine.Begin(s, {1, 2, 3});
  if (step == nullptr) return 1;
  engine.Layer(step, 0, {1, 2, 3}, 40);
  Say('w');
  pause();
  return 0;
});

// Decodes 24 tokens and checks each; 0 if all were right.
const bool kDecode = RegisterRole("decode", [](const std::string& socket, int seed) {
  Engine engine(Linked(), socket);
  std::vector<int32_t> history = Prompt(50, seed);
  const kvs_sequence s = engine.Prefill(kPlans[seed % 4], history);
  if (s == 0) return 2;
  Say('r');
  for (int i = 0; i < 24; ++i) {
    if (!engine.DecodesRight(s, &history, seed * 31 + i)) return 1;
  }
  return 0;
});

// --- tests --------------------------------------------------------------------------------------

class LifecycleTest : public ::testing::Test {
 protected:
  DaemonProcess daemon_;
};

TEST_F(LifecycleTest, EveryPlanDecodesLikeFullBelowMinTokens) {
  Engine engine(Linked(), daemon_.socket());
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  for (const char* plan : kPlans) {
    std::vector<int32_t> history = Prompt(70, 1);
    const kvs_sequence s = engine.Prefill(plan, history);
    ASSERT_NE(s, 0u) << plan << " " << engine.error();
    for (int i = 0; i < 40; ++i) ASSERT_TRUE(engine.DecodesRight(s, &history, 100 + i)) << plan;
  }
  EXPECT_EQ(Operator(daemon_.socket()).Audit(), "");
}

// 160 tokens of prompt on 10 pages; a step reads the first 4 positions and the last 20.
TEST_F(LifecycleTest, AccessCountsAreOfThePagesThatStepsRead) {
  Engine engine(Linked(), daemon_.socket());
  Operator op(daemon_.socket());
  std::vector<int32_t> history = Prompt(160, 3);
  const kvs_sequence s =
      engine.Prefill("window{n_sink = 4, n_recent = 20, min_tokens = 0}", history);
  ASSERT_NE(s, 0u) << engine.error();
  const v1::ShowSequenceResponse before = op.Show(s);
  engine.Run(s, {7}, 160);
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  const v1::ShowSequenceResponse after = op.Show(s);
  ASSERT_GE(after.pages_size(), 11);
  const std::set<int> read = {0, 8, 9, 10};
  for (int page = 0; page < before.pages_size(); ++page) {
    const bool hotter = after.pages(page).selected() > before.pages(page).selected();
    EXPECT_EQ(hotter, read.contains(page)) << "page " << page;
  }
}

TEST_F(LifecycleTest, ForksDivergeAndKeepTheirOwnContent) {
  Engine engine(Linked(), daemon_.socket());
  std::vector<int32_t> parent_ids = Prompt(37, 2);
  const kvs_sequence parent = engine.Prefill("full", parent_ids);
  ASSERT_NE(parent, 0u);
  ASSERT_TRUE(engine.DecodesRight(parent, &parent_ids, 5));
  std::vector<int32_t> child_ids = parent_ids;
  kvs_sequence child = 0;
  ASSERT_EQ(Linked().kvs_sequence_fork(engine.session(), parent, &child), KVS_OK) << engine.error();
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(engine.DecodesRight(parent, &parent_ids, 1000 + i));
    ASSERT_TRUE(engine.DecodesRight(child, &child_ids, 2000 + i));
  }
  Operator admin(daemon_.socket());
  EXPECT_EQ(admin.Audit(), "");
  ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), parent), KVS_OK);
  ASSERT_TRUE(engine.DecodesRight(child, &child_ids, 3000));
  EXPECT_EQ(admin.Audit(), "");
}

TEST_F(LifecycleTest, ASecondEngineSharesThePrefix) {
  Engine first(Linked(), daemon_.socket()), second(Linked(), daemon_.socket());
  std::vector<int32_t> ids = Prompt(100, 3);
  ASSERT_NE(first.Prefill("full", ids), 0u);
  Operator admin(daemon_.socket());
  const uint64_t before = admin.UsedBytes();
  uint32_t held = 0;
  const kvs_sequence s = second.Open("quest", ids, &held);
  ASSERT_NE(s, 0u) << second.error();
  EXPECT_EQ(held, 96u);  // whole pages, and never the last token
  EXPECT_LT(admin.UsedBytes(), 2 * before);
  second.Run(s, {ids.begin() + held, ids.end()}, held);
  ASSERT_EQ(second.code(), KVS_OK) << second.error();
  ASSERT_EQ(Linked().kvs_prefill_done(second.session(), s), KVS_OK);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(second.DecodesRight(s, &ids, 9 + i));
  EXPECT_EQ(admin.Audit(), "");
}

TEST_F(LifecycleTest, AClientKilledInTheMiddleOfAWriteLeavesNothing) {
  Engine other(Linked(), daemon_.socket());
  std::vector<int32_t> ids = Prompt(60, 4);
  const kvs_sequence s = other.Prefill("full", ids);
  ASSERT_NE(s, 0u);
  Operator admin(daemon_.socket());
  for (int round = 0; round < 20; ++round) {
    // `other` grows as it decodes, a moment after its step: wait until its events are handled.
    ASSERT_EQ(Linked().kvs_settle(other.session(), s), KVS_OK);
    const uint64_t before = admin.UsedBytes();
    ClientProcess client("mid-write", daemon_.socket(), 1000 + round);
    ASSERT_TRUE(client.Says('w'));
    EXPECT_GT(admin.UsedBytes(), before);
    client.Kill();
    ASSERT_TRUE(Eventually([&] { return admin.Status().sessions() == 1; }));
    ASSERT_TRUE(Eventually([&] { return admin.UsedBytes() == before; })) << admin.UsedBytes();
    ASSERT_EQ(admin.Audit(), "");
    ASSERT_TRUE(other.DecodesRight(s, &ids, round));
  }
}

TEST_F(LifecycleTest, ADaemonKilledGivesErrorsAndNoHang) {
  Engine engine(Linked(), daemon_.socket());
  std::vector<int32_t> ids = Prompt(60, 5);
  const kvs_sequence s = engine.Prefill("full", ids);
  ASSERT_NE(s, 0u);
  kvs_step* step = engine.Begin(s, {1});
  ASSERT_NE(step, nullptr);
  daemon_.Stop(SIGKILL);
  // What is mapped stays: the open step runs to its end on right bytes.
  ids.push_back(1);
  const std::vector<float> out = engine.Layer(step, 0, {1}, 60);
  EXPECT_EQ(engine.code(), KVS_OK);
  const std::vector<float> want = engine.model().Expected(0, ids);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], 1e-5);
  engine.Layer(step, 1, {1}, 60);
  EXPECT_EQ(Linked().kvs_step_end(step, nullptr), KVS_UNAVAILABLE);
  EXPECT_EQ(Linked().kvs_ping(engine.session()), KVS_UNAVAILABLE);
  EXPECT_EQ(engine.Begin(s, {2}), nullptr);
  EXPECT_EQ(engine.code(), KVS_UNAVAILABLE) << engine.error();
  EXPECT_EQ(engine.Open("full", ids), 0u);
  EXPECT_EQ(engine.code(), KVS_UNAVAILABLE);
}

TEST_F(LifecycleTest, SixtyFourClientsAtOnce) {
  std::vector<std::unique_ptr<ClientProcess>> clients;
  for (int i = 0; i < 64; ++i) {
    clients.push_back(std::make_unique<ClientProcess>("decode", daemon_.socket(), i));
  }
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(clients[i]->Says('r')) << i;
  for (int i = 0; i < 64; ++i) {
    const int status = clients[i]->Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "client " << i << ": " << status;
  }
  Operator admin(daemon_.socket());
  EXPECT_TRUE(Eventually([&] { return admin.Status().sessions() == 0; }));
  EXPECT_EQ(admin.UsedBytes(), 0u);
  EXPECT_EQ(admin.Audit(), "");
}

TEST(PoolTest, ExhaustionRefusesTheNewAndKeepsTheRunning) {
  DaemonProcess daemon({"--set", "pool.device_bytes=16MiB", "--set", "pool.host_bytes=16MiB"});
  Engine engine(Linked(), daemon.socket());
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  std::vector<int32_t> ids = Prompt(200, 6);
  const kvs_sequence running = engine.Prefill("full", ids);
  ASSERT_NE(running, 0u) << engine.error();
  Operator admin(daemon.socket());
  std::vector<kvs_sequence> others;
  int code = KVS_OK;
  for (int i = 0; i < 100 && code == KVS_OK; ++i) {
    const kvs_sequence s = engine.Open("full", Prompt(2000, 100 + i));
    code = engine.code();
    if (s != 0) others.push_back(s);
  }
  EXPECT_EQ(code, KVS_RESOURCE_EXHAUSTED) << engine.error();
  EXPECT_STREQ(Linked().kvs_error_reason(), "POOL_EXHAUSTED");
  EXPECT_GE(others.size(), 2u);
  EXPECT_EQ(admin.Audit(), "");
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(engine.DecodesRight(running, &ids, i));
  for (kvs_sequence s : others) EXPECT_EQ(Linked().kvs_sequence_close(engine.session(), s), KVS_OK);
  EXPECT_NE(engine.Open("full", Prompt(2000, 999)), 0u) << engine.error();
  EXPECT_EQ(admin.Audit(), "");
}

// A reader between begin and end keeps its bytes through 1,000 publications, a fork and a second
// engine on the same prefix; afterwards everything that was replaced comes back.
TEST_F(LifecycleTest, AParkedReaderKeepsItsBytes) {
  Engine engine(Linked(), daemon_.socket()), second(Linked(), daemon_.socket());
  std::vector<int32_t> ids = Prompt(130, 7);
  const kvs_sequence s = engine.Prefill("quest", ids);
  ASSERT_NE(s, 0u);
  Operator admin(daemon_.socket());
  const uint64_t used = admin.UsedBytes();

  kvs_step* step = engine.Begin(s, {1});
  ASSERT_NE(step, nullptr);
  std::vector<kvs_page> pages(64);
  size_t n = 0;
  uint64_t version = 0;
  ASSERT_EQ(Linked().kvs_page_table(engine.session(), s, pages.data(), pages.size(), &n, &version),
            KVS_OK);
  const size_t page_bytes = size_t{2} * 2 * 2 * 16 * 64 * 4;
  std::vector<std::vector<char>> before;
  for (size_t i = 0; i < 130 / 16; ++i) {
    const char* p = static_cast<const char*>(pages[i].address);
    before.emplace_back(p, p + page_bytes);
  }

  const uint64_t published = admin.Status().publications();
  for (int i = 0; i < 500; ++i) {
    ASSERT_GT(admin.Demote(s).pages(), 0u);
    ASSERT_GT(admin.Prefetch(s).pages(), 0u);
  }
  EXPECT_GE(admin.Status().publications(), published + 1000);
  const kvs_sequence sharing = second.Prefill("full", ids);
  ASSERT_NE(sharing, 0u) << second.error();
  kvs_sequence child = 0;
  ASSERT_EQ(Linked().kvs_sequence_fork(engine.session(), s, &child), KVS_OK) << engine.error();

  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_EQ(std::memcmp(pages[i].address, before[i].data(), page_bytes), 0) << "page " << i;
  }
  EXPECT_GT(admin.RetiredBytes(), 0u);
  std::vector<int32_t> after = ids;
  after.push_back(1);
  for (int layer = 0; layer < 2; ++layer) {
    const auto out = engine.Layer(step, layer, {1}, 130);
    const auto want = engine.model().Expected(layer, after);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], 1e-5);
  }
  ASSERT_EQ(Linked().kvs_step_end(step, nullptr), KVS_OK);
  EXPECT_TRUE(Eventually([&] { return admin.RetiredBytes() == 0; })) << admin.RetiredBytes();
  EXPECT_EQ(admin.Audit(), "");
  ASSERT_TRUE(engine.DecodesRight(s, &after, 2));
  std::vector<int32_t> child_ids = ids;
  ASSERT_TRUE(engine.DecodesRight(child, &child_ids, 3));
  ASSERT_TRUE(second.DecodesRight(sharing, &ids, 4));
  ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), child), KVS_OK);
  ASSERT_EQ(Linked().kvs_sequence_close(second.session(), sharing), KVS_OK);
  EXPECT_TRUE(Eventually([&] { return admin.UsedBytes() <= used + page_bytes * 4; }));
  EXPECT_EQ(admin.Audit(), "");
}

TEST_F(LifecycleTest, FirstUseAfterADaemonRestartIsRefusedNotWrong) {
  auto engine = std::make_unique<Engine>(Linked(), daemon_.socket());
  ASSERT_NE(engine->Prefill("full", Prompt(20, 8)), 0u);
  daemon_.Stop(SIGKILL);
  EXPECT_EQ(Linked().kvs_ping(engine->session()), KVS_UNAVAILABLE);
}

}  // namespace
}  // namespace kvstrata::testing
