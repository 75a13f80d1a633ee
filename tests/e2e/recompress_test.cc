// SPDX-License-Identifier: Apache-2.0
// Recompression by a real daemon with real codecs: decode stays right while workers publish, and
// every way to end leaves the books clean.
#include <cstring>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::testing {
namespace {

// Every element of every vector is kept, in bf16: full attention over it is full attention, nearly.
constexpr const char* kPacked =
    "{selector = \"full\", codec = \"packed\", keep = 64, truncate = false, min_tokens = 0, "
    "keep_raw = \"no\"}";
constexpr const char* kPackedOnHost =
    "{selector = \"full\", codec = \"packed\", keep = 64, truncate = false, min_tokens = 0, "
    "keep_raw = \"host\"}";
constexpr float kBFloat = 0.02f;

// The largest distance of the outputs of one decoded token from full attention, over all layers.
float DecodeError(Engine& engine, kvs_sequence s, std::vector<int32_t>* history, int32_t id) {
  const auto first = static_cast<uint32_t>(history->size());
  history->push_back(id);
  const auto outs = engine.Run(s, {id}, first);
  EXPECT_FALSE(outs.empty()) << engine.error();
  if (outs.empty()) return NAN;
  float worst = 0;
  for (int layer = 0; layer < engine.model().layers; ++layer) {
    const std::vector<float> want = engine.model().Expected(layer, *history);
    for (size_t i = 0; i < want.size(); ++i) {
      worst = std::max(worst, std::abs(outs[static_cast<size_t>(layer)][i] - want[i]));
    }
  }
  return worst;
}

// --- client roles -------------------------------------------------------------------------------

// Gives the workers much to do, says 'w', and decodes until it is killed.
const bool kBusy = RegisterRole("busy", [](const std::string& socket, int seed) {
  Engine engine(Linked(), socket);
  for (int i = 0; i < 3; ++i) {
    if (engine.Prefill(kPacked, Prompt(1500, seed + i)) == 0) return 1;
  }
  std::vector<int32_t> history = Prompt(600, seed + 9);
  const kvs_sequence s = engine.Prefill(kPacked, history);
  if (s == 0) return 2;
  Say('w');
  for (int i = 0;; ++i) {
    engine.Run(s, {i}, static_cast<uint32_t>(history.size()) + static_cast<uint32_t>(i));
    if (engine.code() != KVS_OK) return 3;
  }
});

// --- tests --------------------------------------------------------------------------------------

class RecompressTest : public ::testing::Test {
 protected:
  DaemonProcess daemon_;
  Operator admin_{daemon_.socket()};
};

TEST_F(RecompressTest, DecodeStaysRightWhileRowsAreRecompressed) {
  Engine engine(Linked(), daemon_.socket());
  std::vector<int32_t> history = Prompt(500, 1);
  const kvs_sequence s = engine.Prefill(kPacked, history);
  ASSERT_NE(s, 0u) << engine.error();
  for (int i = 0; i < 150; ++i) {
    ASSERT_LT(DecodeError(engine, s, &history, 7 * i), kBFloat) << i;
    if (i % 40 == 39) {
      ASSERT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    }
  }
  const auto shown = admin_.Show(s);
  EXPECT_GT(shown.sequence().extents(), 0u);
  EXPECT_GT(shown.sequence().absent_pages(), 30u);
  EXPECT_EQ(shown.sequence().work_error(), "");
  ASSERT_GT(shown.extents_size(), 0);
  EXPECT_EQ(shown.extents(0).kind(), "packed");
  EXPECT_EQ(shown.extents(0).begin(), 0);
  EXPECT_TRUE(shown.pages(0).absent());
  EXPECT_GT(admin_.Status().recompressions(), 2u);
  EXPECT_GT(admin_.Status().released_bytes(), 0u);
  EXPECT_EQ(admin_.Audit(), "");
  EXPECT_EQ(admin_.Work().work_size(), 0);
  // The address of a page that was released is NULL.
  std::vector<kvs_page> pages(64);
  size_t n = 0;
  uint64_t version = 0;
  ASSERT_EQ(Linked().kvs_page_table(engine.session(), s, pages.data(), pages.size(), &n, &version),
            KVS_OK);
  EXPECT_EQ(pages[0].address, nullptr);
  EXPECT_NE(pages[n - 1].address, nullptr);
  ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), s), KVS_OK);
  (void)admin_.Evict();
  EXPECT_TRUE(Eventually([&] { return admin_.HeldBytes() == 0; })) << admin_.HeldBytes();
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_F(RecompressTest, BothTransportsGiveTheSameBits) {
  ToyModel remote_model;
  remote_model.digest = "toy-remote";  // no prefix in common
  Engine linked(Linked(), daemon_.socket()), remote(Remote(), daemon_.socket(), remote_model);
  for (const char* plan : {kPacked, kPackedOnHost}) {
    const std::vector<int32_t> prompt = Prompt(400, 2);
    const kvs_sequence a = linked.Prefill(plan, prompt), b = remote.Prefill(plan, prompt);
    ASSERT_NE(a, 0u) << linked.error();
    ASSERT_NE(b, 0u) << remote.error();
    for (int i = 0; i < 80; ++i) {
      ASSERT_EQ(Linked().kvs_settle(linked.session(), a), KVS_OK) << linked.error();
      ASSERT_EQ(Remote().kvs_settle(remote.session(), b), KVS_OK) << remote.error();
      const auto at = static_cast<uint32_t>(prompt.size()) + static_cast<uint32_t>(i);
      const auto x = linked.Run(a, {3 * i}, at), y = remote.Run(b, {3 * i}, at);
      ASSERT_FALSE(x.empty()) << linked.error();
      ASSERT_EQ(x, y) << i;
    }
    EXPECT_GT(admin_.Show(a).sequence().extents(), 0u);
    EXPECT_EQ(admin_.Show(a).sequence().extents(), admin_.Show(b).sequence().extents());
  }
  EXPECT_EQ(admin_.Audit(), "");
}

// Spans need the surprisal of the whole prompt: that of a held prefix is found with its pages.
TEST_F(RecompressTest, SpansOfAHeldPrefix) {
  for (const Abi* abi : {&Linked(), &Remote()}) {
    ToyModel model;
    model.digest += abi->kvs_transport();
    Engine engine(*abi, daemon_.socket(), model);
    std::vector<int32_t> prompt = Prompt(400, 3);
    std::vector<float> nats;
    for (int i = 0; i < 460; ++i) nats.push_back(static_cast<float>(i * 37 % 101) / 20);
    const kvs_sequence first = engine.Prefill("full", prompt);
    ASSERT_NE(first, 0u) << engine.error();
    ASSERT_EQ(abi->kvs_report(engine.session(), first, 0, 400, nats.data(), nullptr, nullptr),
              KVS_OK);

    const std::vector<int32_t> more = Prompt(60, 4);
    prompt.insert(prompt.end(), more.begin(), more.end());
    uint32_t held = 0;
    const kvs_sequence s =
        engine.Open("sekv{min_tokens = 0, rows = 20, local = 16}", prompt, &held);
    ASSERT_EQ(held, 400u) << engine.error();
    ASSERT_FALSE(engine.Run(s, more, held).empty()) << engine.error();
    ASSERT_EQ(abi->kvs_report(engine.session(), s, held, 60, nats.data() + held, nullptr, nullptr),
              KVS_OK);
    ASSERT_EQ(abi->kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    ASSERT_EQ(abi->kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    char status[256];
    ASSERT_EQ(abi->kvs_sequence_status(engine.session(), s, status, sizeof(status)), KVS_OK);
    EXPECT_EQ(std::string(status).find("surprisal"), std::string::npos) << status;
    EXPECT_GT(admin_.Show(s).sequence().extents(), 0u);
    ASSERT_FALSE(engine.Run(s, {5}, 460).empty()) << engine.error();
  }
  EXPECT_EQ(admin_.Audit(), "");
}

// Factors of spans on either tier: the same bytes, and so the same outputs.
TEST_F(RecompressTest, FactorsLieWhereThePlanSays) {
  ToyModel model;
  std::vector<std::vector<std::vector<float>>> outputs;  // by placement
  for (const std::string tier : {"host", "device"}) {
    model.digest = "toy-" + tier;  // no prefix in common
    Engine engine(Linked(), daemon_.socket(), model);
    const std::vector<int32_t> prompt = Prompt(400, 6);
    std::vector<float> nats;
    for (int i = 0; i < 400; ++i) nats.push_back(static_cast<float>(i * 37 % 101) / 20);
    uint32_t held = 0;
    const std::string plan =
        "sekv{min_tokens = 0, rows_share = 0.6, local = 16, r_max = 2, factors = \"" + tier + "\"}";
    const kvs_sequence s = engine.Open(plan.c_str(), prompt, &held);
    ASSERT_FALSE(engine.Run(s, prompt, held).empty()) << engine.error();
    ASSERT_EQ(Linked().kvs_report(engine.session(), s, 0, 400, nats.data(), nullptr, nullptr),
              KVS_OK);
    ASSERT_EQ(Linked().kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    ASSERT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    int factors = 0;
    const auto shown = admin_.Show(s);
    for (const auto& extent : shown.extents()) {
      const bool of_factors = extent.kind() == "span_factors";
      EXPECT_EQ(extent.tier(), of_factors ? tier : "device") << extent.kind();
      factors += of_factors ? 1 : 0;
    }
    EXPECT_GT(factors, 0);
    outputs.push_back(engine.Run(s, {5}, 400));
    ASSERT_FALSE(outputs.back().empty()) << engine.error();
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_F(RecompressTest, AClientKilledWhileWorkersRunLeavesNothing) {
  for (int round = 0; round < 8; ++round) {
    ClientProcess client("busy", daemon_.socket(), 100 * round);
    ASSERT_TRUE(client.Says('w'));
    client.Kill();
    ASSERT_TRUE(Eventually([&] { return admin_.Status().sessions() == 0; }));
    EXPECT_EQ(admin_.Audit(), "");
    EXPECT_TRUE(Eventually([&] {
      (void)admin_.Evict();
      return admin_.HeldBytes() == 0;
    })) << admin_.HeldBytes();
    EXPECT_EQ(admin_.Work().work_size(), 0);
    ASSERT_EQ(admin_.Audit(), "");
  }
}

TEST_F(RecompressTest, CloseCancels) {
  Engine engine(Linked(), daemon_.socket());
  for (int i = 0; i < 12; ++i) {
    const kvs_sequence s = engine.Prefill(kPacked, Prompt(900, i));
    ASSERT_NE(s, 0u) << engine.error();
    ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), s), KVS_OK);
    ASSERT_EQ(admin_.Audit(), "");
  }
  EXPECT_TRUE(Eventually([&] {
    (void)admin_.Evict();
    return admin_.HeldBytes() == 0;
  })) << admin_.HeldBytes();
}

// A step that began before its rows were recompressed ends on the bytes that it began with.
TEST_F(RecompressTest, AParkedStepKeepsItsBytes) {
  Engine engine(Linked(), daemon_.socket());
  std::vector<int32_t> history = Prompt(1200, 5);
  const kvs_sequence s = engine.Prefill(kPacked, history);
  ASSERT_NE(s, 0u) << engine.error();
  kvs_step* step = engine.Begin(s, {1});
  ASSERT_NE(step, nullptr) << engine.error();
  std::vector<kvs_page> pages(128);
  size_t n = 0;
  uint64_t version = 0;
  ASSERT_EQ(Linked().kvs_page_table(engine.session(), s, pages.data(), pages.size(), &n, &version),
            KVS_OK);
  const size_t page_bytes = size_t{2} * 2 * 2 * 16 * 64 * 4;
  std::vector<std::vector<char>> before;
  for (size_t i = 0; i < 1200 / 16; ++i) {
    const char* at = static_cast<const char*>(pages[i].address);
    if (at == nullptr) continue;  // the worker was faster
    before.emplace_back(at, at + page_bytes);
  }
  ASSERT_TRUE(Eventually([&] { return admin_.Show(s).sequence().absent_pages() >= 70; }, 60000));
  size_t next = 0;
  for (size_t i = 0; i < 1200 / 16; ++i) {
    if (pages[i].address == nullptr) continue;
    ASSERT_EQ(std::memcmp(pages[i].address, before[next++].data(), page_bytes), 0) << "page " << i;
  }
  if (!before.empty()) {
    EXPECT_GT(admin_.RetiredBytes(), 0u);
  }
  history.push_back(1);
  for (int layer = 0; layer < 2; ++layer) {
    const auto out = engine.Layer(step, layer, {1}, 1200);
    const auto want = engine.model().Expected(layer, history);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], kBFloat);
  }
  ASSERT_EQ(Linked().kvs_step_end(step, nullptr), KVS_OK);
  EXPECT_TRUE(Eventually([&] { return admin_.RetiredBytes() == 0; })) << admin_.RetiredBytes();
  ASSERT_LT(DecodeError(engine, s, &history, 2), kBFloat);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_F(RecompressTest, TheSamePromptIsNotBuiltTwice) {
  Engine engine(Linked(), daemon_.socket());
  std::vector<int32_t> history = Prompt(500, 6);
  const kvs_sequence a = engine.Prefill(kPackedOnHost, history);
  ASSERT_NE(a, 0u) << engine.error();
  ASSERT_EQ(Linked().kvs_settle(engine.session(), a), KVS_OK) << engine.error();
  const uint64_t runs = admin_.Status().recompressions();
  uint32_t held = 0;
  const kvs_sequence b = engine.Open(kPackedOnHost, history, &held);
  EXPECT_EQ(held, 496u);
  engine.Run(b, {history.begin() + held, history.end()}, held);
  ASSERT_EQ(Linked().kvs_prefill_done(engine.session(), b), KVS_OK);
  ASSERT_EQ(Linked().kvs_settle(engine.session(), b), KVS_OK) << engine.error();
  EXPECT_EQ(admin_.Status().recompressions(), runs);
  EXPECT_EQ(admin_.Status().artefact_hits(), 1u);
  ASSERT_LT(DecodeError(engine, b, &history, 3), kBFloat);
  EXPECT_EQ(admin_.Show(b).extents(0).references(), 3u) << "two sequences and the artefact";
  EXPECT_EQ(admin_.Audit(), "");
}

TEST(WorkTest, AFullQueueLosesNothingAndIsShown) {
  DaemonProcess daemon({"--set", "work.queue=1"});
  Engine engine(Linked(), daemon.socket());
  Operator admin(daemon.socket());
  std::vector<kvs_sequence> sequences;
  int seen = 0;
  for (int i = 0; i < 6; ++i) {
    sequences.push_back(engine.Prefill(kPacked, Prompt(1000, i)));
    ASSERT_NE(sequences.back(), 0u) << engine.error();
    seen = std::max(seen, admin.Work().work_size());
  }
  EXPECT_GT(seen, 0);
  for (const kvs_sequence s : sequences) {
    int code = KVS_DEADLINE_EXCEEDED;
    while (code == KVS_DEADLINE_EXCEEDED) code = Linked().kvs_settle(engine.session(), s);
    EXPECT_EQ(code, KVS_OK) << engine.error();
    EXPECT_GT(admin.Show(s).sequence().absent_pages(), 50u);
  }
  EXPECT_EQ(admin.Work().work_size(), 0);
  EXPECT_EQ(admin.Audit(), "");
}

TEST(WorkTest, WithoutMemoryRowsStayRawAndItIsSaid) {
  // One arena a pool: this session takes both, and the workers none.
  DaemonProcess daemon({"--set", "pool.device_bytes=16MiB", "--set", "pool.host_bytes=16MiB"});
  Engine engine(Linked(), daemon.socket());
  Operator admin(daemon.socket());
  const kvs_sequence host = engine.Prefill("full{tier = \"host\"}", Prompt(100, 1));
  ASSERT_NE(host, 0u) << engine.error();
  std::vector<int32_t> history = Prompt(300, 2);
  const kvs_sequence s = engine.Prefill(kPacked, history);
  ASSERT_NE(s, 0u) << engine.error();
  EXPECT_EQ(Linked().kvs_settle(engine.session(), s), KVS_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(Linked().kvs_error_reason(), "POOL_EXHAUSTED");
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(engine.DecodesRight(s, &history, i));
  const auto shown = admin.Show(s);
  EXPECT_EQ(shown.sequence().extents(), 0u);
  EXPECT_NE(shown.sequence().work_error().find("POOL_EXHAUSTED"), std::string::npos);
  ASSERT_EQ(admin.Work().work_size(), 1);
  EXPECT_NE(admin.Work().work(0).error().find("POOL_EXHAUSTED"), std::string::npos);
  EXPECT_EQ(admin.Audit(), "");
  // When there is memory it is done without being asked for.
  ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), host), KVS_OK);
  (void)admin.Evict();
  EXPECT_TRUE(Eventually([&] { return admin.Show(s).sequence().extents() > 0; }, 30000));
  EXPECT_EQ(admin.Audit(), "");
  ASSERT_LT(DecodeError(engine, s, &history, 99), kBFloat);
}

TEST(WorkTest, AnUnknownParameterFileIsRefusedAtOpen) {
  DaemonProcess daemon({"--set", "parameters.directory=/tmp"});
  Engine engine(Linked(), daemon.socket());
  EXPECT_EQ(engine.Open("sekv{parameters = \"../etc/passwd\"}", Prompt(20, 1)), 0u);
  EXPECT_EQ(engine.code(), KVS_INVALID_ARGUMENT) << engine.error();
  EXPECT_STREQ(Linked().kvs_error_reason(), "PLAN_OPTION_INVALID");
  EXPECT_EQ(engine.Open("sekv{parameters = \"kvstrata-none.safetensors\"}", Prompt(20, 1)), 0u);
  EXPECT_STREQ(Linked().kvs_error_reason(), "PARAMETERS_MISSING") << engine.error();
}

}  // namespace
}  // namespace kvstrata::testing
