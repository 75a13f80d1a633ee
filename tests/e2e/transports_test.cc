// SPDX-License-Identifier: Apache-2.0
// The linked and the remote transport give the same bits: same plans, same inputs, every output
// compared.
#include <cstring>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"

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

class TransportsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(TransportsTest, SameBits) {
  DaemonProcess daemon;
  ToyModel linked_model, remote_model;
  remote_model.digest = "toy-remote";  // no prefix in common: each transport computes for itself
  Engine linked(Linked(), daemon.socket(), linked_model);
  Engine remote(Remote(), daemon.socket(), remote_model);
  ASSERT_EQ(linked.code(), KVS_OK) << linked.error();
  ASSERT_EQ(remote.code(), KVS_OK) << remote.error();
  EXPECT_STREQ(Linked().kvs_transport(), "linked");
  EXPECT_STREQ(Remote().kvs_transport(), "remote");
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
    Plans, TransportsTest,
    ::testing::Values("full", "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
                      "quest{budget = 128, min_tokens = 0}", "bits{budget = 128, min_tokens = 0}",
                      "chess{page = 16, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, "
                      "rho = [0.6, 0.6, 0.5], thresholds = [0.9, 0.0], min_tokens = 0}"));

// What session/ does for both transports, on each of them.
class EachTransportTest : public ::testing::TestWithParam<const char*> {
 protected:
  const Abi& abi() const { return GetParam() == std::string("linked") ? Linked() : Remote(); }

  DaemonProcess daemon_;
  Engine engine_{abi(), daemon_.socket()};
};

INSTANTIATE_TEST_SUITE_P(Transports, EachTransportTest, ::testing::Values("linked", "remote"),
                         [](const auto& transport) { return std::string(transport.param); });

// kvs_close_key: "of a batch, that member's code".
TEST_P(EachTransportTest, ABatchSaysWhichOfItsMembersWasClosedByItsKey) {
  const kvs_sequence good = engine_.Prefill("full", Prompt(40, 1));
  ASSERT_NE(good, 0u) << engine_.error();
  kvs_open_options options{};
  options.size = sizeof(options);
  options.key = "one";
  kvs_opened closed{};
  closed.size = sizeof(closed);
  ASSERT_EQ(abi().kvs_sequence_open_with(engine_.session(), engine_.handle(), "full", nullptr, 0,
                                         &options, &closed),
            KVS_OK)
      << engine_.error();
  Engine other(abi(), daemon_.socket());
  ASSERT_EQ(abi().kvs_close_key(other.session(), "one"), KVS_OK) << other.error();

  const int32_t id = 5;
  const kvs_step_member members[] = {{good, &id, 1}, {closed.sequence, &id, 1}};
  kvs_step* step = nullptr;
  int32_t codes[] = {-1, -1};
  EXPECT_EQ(abi().kvs_step_begin(engine_.session(), members, 2, nullptr, &step, codes),
            KVS_NOT_FOUND);
  EXPECT_STREQ(abi().kvs_error_reason(), "SEQUENCE_CLOSED");
  EXPECT_EQ(codes[0], KVS_OK);
  EXPECT_EQ(codes[1], KVS_NOT_FOUND);
  EXPECT_EQ(abi().kvs_sequence_close(engine_.session(), closed.sequence), KVS_NOT_FOUND);
  std::vector<int32_t> history = Prompt(40, 1);
  EXPECT_TRUE(engine_.DecodesRight(good, &history, id));
}

// A table that is too short grows, and a page that is shared with a fork is copied before a step
// writes it.
TEST_P(EachTransportTest, TablesGrowAndForksPartWays) {
  std::vector<int32_t> history = Prompt(40, 2);
  const kvs_sequence parent = engine_.Prefill("full", history);
  ASSERT_NE(parent, 0u) << engine_.error();
  kvs_sequence fork = 0;
  ASSERT_EQ(abi().kvs_sequence_fork(engine_.session(), parent, &fork), KVS_OK) << engine_.error();
  std::vector<int32_t> forked = history;
  EXPECT_TRUE(engine_.DecodesRight(fork, &forked, 7));
  EXPECT_TRUE(engine_.DecodesRight(parent, &history, 8));
  EXPECT_TRUE(engine_.DecodesRight(fork, &forked, 9));
  const std::vector<int32_t> many = Prompt(1000, 3);
  ASSERT_FALSE(engine_.Run(parent, many, static_cast<uint32_t>(history.size())).empty())
      << engine_.error();
  history.insert(history.end(), many.begin(), many.end());
  EXPECT_TRUE(engine_.DecodesRight(parent, &history, 10));
  EXPECT_TRUE(engine_.DecodesRight(fork, &forked, 11));
}

TEST_P(EachTransportTest, ABatchHasOneModelAndASequenceOnce) {
  const kvs_sequence s = engine_.Prefill("full", Prompt(40, 1));
  ToyModel second;
  second.digest = "toy-second";
  const kvs_model_desc desc = second.Desc();
  kvs_model model = 0;
  ASSERT_EQ(abi().kvs_model_register(engine_.session(), &desc, &model), KVS_OK);
  kvs_sequence of_second = 0;
  ASSERT_EQ(
      abi().kvs_sequence_open(engine_.session(), model, "full", nullptr, 0, &of_second, nullptr),
      KVS_OK)
      << engine_.error();
  const int32_t id = 5;
  const auto refused = [&](std::vector<kvs_sequence> sequences, const char* reason) {
    std::vector<kvs_step_member> members;
    for (const kvs_sequence each : sequences) members.push_back({each, &id, 1});
    std::vector<int32_t> codes(members.size(), -1);
    kvs_step* step = nullptr;
    EXPECT_NE(abi().kvs_step_begin(engine_.session(), members.data(), members.size(), nullptr,
                                   &step, codes.data()),
              KVS_OK);
    EXPECT_STREQ(abi().kvs_error_reason(), reason);
    return codes;
  };
  EXPECT_EQ(refused({s, of_second}, "MODELS_MIXED"), (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(refused({of_second, s, of_second}, "MODELS_MIXED"), (std::vector<int32_t>{0, 3, 9}));
  EXPECT_EQ(refused({s, s + 1000}, "SEQUENCE_UNKNOWN"), (std::vector<int32_t>{0, 5}));
}

// What one transport's client left on disk is held by the next daemon on the other, and on its own.
TEST(DiskTransportsTest, BothHoldWhatIsOnDisk) {
  const ScratchDir folder;
  const std::string tier = folder / "tier";
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
}

}  // namespace
}  // namespace kvstrata::testing
