// SPDX-License-Identifier: Apache-2.0
// Building and recompressing on request against a real daemon, on both transports and by an
// operator: what was built is used and not made again, what is missing is named, what is cancelled
// leaves nothing behind.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tests/e2e/engine.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::testing {
namespace {

constexpr const char* kQuest = "quest{min_tokens = 0, budget = 128}";
constexpr const char* kChess = "chess{min_tokens = 0, page = 16, pages_per_chunk = 4}";
// Codes of every element: what is packed is not the raw rows' bits.
constexpr const char* kPacked =
    "{selector = \"full\", codec = \"packed\", max_loss = 1, keep = 16, segment = 256, min_tokens "
    "= 0, "
    "keep_raw = \"no\"}";
constexpr uint32_t kBlock = 512;  // tokens of an index block of these plans

// A call that waits for workers, which may take longer than the session waits: they go on.
int Patiently(const std::function<int()>& call) {
  int code = KVS_DEADLINE_EXCEEDED;
  while (code == KVS_DEADLINE_EXCEEDED) code = call();
  return code;
}
int Recompress(Engine& engine, kvs_sequence s) {
  return Patiently([&] { return engine.abi().kvs_sequence_recompress(engine.session(), s); });
}
int Settle(Engine& engine, kvs_sequence s) {
  return Patiently([&] { return engine.abi().kvs_settle(engine.session(), s); });
}

class BuildTest : public ::testing::TestWithParam<const Abi& (*)()> {
 protected:
  const Abi& abi() const { return GetParam()(); }
  // Builds a sequence under its own plan, or another one. Returns the code; what failed is in
  // `why`.
  static int Build(Engine& engine, kvs_sequence s, const char* plan, kvs_build_result* built,
                   std::string* why = nullptr) {
    *built = {};
    built->size = sizeof(*built);
    const int code = Patiently(
        [&] { return engine.abi().kvs_sequence_build(engine.session(), s, plan, built); });
    if (why != nullptr) *why = code == KVS_OK ? "" : engine.error();
    return code;
  }
  static ToyModel Named(const std::string& digest) {
    ToyModel model;
    model.digest = digest;
    return model;
  }
  // The outputs of three decode steps behind a prompt that was held up to `held`.
  static std::vector<std::vector<float>> Decode(Engine& engine, kvs_sequence s,
                                                const std::vector<int32_t>& prompt, uint32_t held) {
    std::vector<std::vector<float>> all;
    engine.Run(s, {prompt.begin() + held, prompt.end()}, held);
    EXPECT_EQ(engine.abi().kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    for (int32_t id = 1; id <= 3; ++id) {
      auto outs = engine.Run(s, {id}, static_cast<uint32_t>(prompt.size()) + id - 1);
      EXPECT_FALSE(outs.empty()) << engine.error();
      all.insert(all.end(), outs.begin(), outs.end());
    }
    return all;
  }

  DaemonProcess daemon_;
  Operator admin_{daemon_.socket()};
};

TEST_P(BuildTest, StepsFindTheIndexAndGiveTheSameBits) {
  const std::vector<int32_t> prompt = Prompt(1640, 1);
  for (const char* plan : {kQuest, kChess}) {
    Engine plain(abi(), daemon_.socket(), Named("plain"));
    uint32_t held = 0;
    const kvs_sequence reference = plain.Open(plan, prompt, &held);
    ASSERT_NE(reference, 0u) << plain.error();
    const auto want = Decode(plain, reference, prompt, held);

    Engine engine(abi(), daemon_.socket(), Named(plan));
    ASSERT_NE(engine.Prefill("full", prompt), 0u) << engine.error();
    const kvs_sequence s = engine.Open(plan, prompt, &held);
    ASSERT_NE(s, 0u) << engine.error();
    ASSERT_EQ(held, 1632u);
    kvs_build_result built;
    ASSERT_EQ(Build(engine, s, nullptr, &built), KVS_OK) << engine.error();
    EXPECT_EQ(built.built_blocks, held / kBlock) << plan;
    EXPECT_EQ(built.indexed_tokens, held);
    const auto before = admin_.Show(s);
    ASSERT_TRUE(before.index_blocks(2).sealed());
    EXPECT_EQ(Decode(engine, s, prompt, held), want) << plan;
    const auto after = admin_.Show(s);
    EXPECT_EQ(after.index_blocks(2).offset(), before.index_blocks(2).offset()) << "made again";
    EXPECT_EQ(after.index_blocks(2).arena(), before.index_blocks(2).arena()) << "made again";
    EXPECT_EQ(admin_.Audit(), "");
  }
}

TEST_P(BuildTest, AnotherPlansIndexIsThereWhenItIsOpened) {
  const std::vector<int32_t> prompt = Prompt(1640, 2);
  Engine engine(abi(), daemon_.socket());
  const kvs_sequence full = engine.Prefill("full", prompt);
  ASSERT_NE(full, 0u) << engine.error();
  kvs_build_result built;
  ASSERT_EQ(Build(engine, full, kQuest, &built), KVS_OK) << engine.error();
  EXPECT_EQ(built.built_blocks, 3u);
  EXPECT_EQ(built.indexed_tokens, 3 * kBlock);
  uint32_t held = 0;
  const kvs_sequence s = engine.Open(kQuest, prompt, &held);
  ASSERT_NE(s, 0u) << engine.error();
  ASSERT_EQ(Build(engine, s, nullptr, &built), KVS_OK) << engine.error();
  EXPECT_EQ(built.built_blocks, 0u) << "nothing was left to the workers";
  EXPECT_EQ(built.indexed_tokens, held);
  EXPECT_EQ(admin_.Audit(), "");
}

// The engine learns of it at its next step, from the table.
TEST_P(BuildTest, AnOperatorBuildsForARunningEngine) {
  const std::vector<int32_t> prompt = Prompt(1640, 3);
  Engine plain(abi(), daemon_.socket(), Named("plain"));
  const auto want = Decode(plain, plain.Open(kQuest, prompt), prompt, 0);
  Engine engine(abi(), daemon_.socket());
  ASSERT_NE(engine.Prefill("full", prompt), 0u) << engine.error();
  uint32_t held = 0;
  const kvs_sequence s = engine.Open(kQuest, prompt, &held);
  v1::BuildSequenceResponse built;
  ASSERT_TRUE(admin_.Build(s, "", &built).ok());
  EXPECT_TRUE(built.done());
  EXPECT_EQ(built.indexed_tokens(), 3 * kBlock);
  const auto before = admin_.Show(s);
  EXPECT_EQ(Decode(engine, s, prompt, held), want);
  const auto after = admin_.Show(s);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(after.index_blocks(i).sealed());
    EXPECT_EQ(after.index_blocks(i).offset(), before.index_blocks(i).offset()) << "made again";
  }
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_P(BuildTest, WhatIsMissingIsNamedAndThenBuilt) {
  const std::vector<int32_t> prompt = Prompt(700, 4);
  Engine engine(abi(), daemon_.socket());
  kvs_build_result built;
  std::string why;
  const auto reported = [&](kvs_sequence s, const float* surprisal, const uint8_t* boundary) {
    return abi().kvs_report(engine.session(), s, 0, 700, surprisal, nullptr, boundary);
  };
  const std::vector<float> surprisal(700, 1.0f);
  std::vector<uint8_t> boundary(700, 0);
  for (size_t i = 19; i < boundary.size(); i += 20) boundary[i] = 1;

  const char* const kSentences = "sentencekv{min_tokens = 0}";
  kvs_sequence s = engine.Open(kSentences, prompt);
  engine.Run(s, prompt, 0);
  EXPECT_EQ(Build(engine, s, nullptr, &built, &why), KVS_FAILED_PRECONDITION);
  EXPECT_NE(why.find("queries of the prompt's last 32 tokens"), std::string::npos) << why;
  ASSERT_EQ(abi().kvs_prefill_done(engine.session(), s), KVS_OK);
  EXPECT_EQ(Build(engine, s, nullptr, &built, &why), KVS_FAILED_PRECONDITION);
  EXPECT_NE(why.find("BUILD_INPUT"), std::string::npos) << why;
  EXPECT_NE(why.find("sentence ends"), std::string::npos) << why;
  ASSERT_EQ(reported(s, nullptr, boundary.data()), KVS_OK) << engine.error();
  EXPECT_EQ(Build(engine, s, nullptr, &built, &why), KVS_OK) << why;

  const char* const kSpans = "sekv{min_tokens = 0, local = 64, keep_raw = \"host\"}";
  s = engine.Open(kSpans, prompt);
  uint32_t tokens = 0;
  ASSERT_EQ(abi().kvs_sequence_tokens(engine.session(), s, &tokens), KVS_OK);
  engine.Run(s, {prompt.begin() + tokens, prompt.end()}, tokens);
  EXPECT_EQ(Build(engine, s, nullptr, &built, &why), KVS_FAILED_PRECONDITION);
  EXPECT_NE(why.find("end of the prompt"), std::string::npos) << why;
  ASSERT_EQ(abi().kvs_prefill_done(engine.session(), s), KVS_OK);
  EXPECT_EQ(Build(engine, s, nullptr, &built, &why), KVS_FAILED_PRECONDITION);
  EXPECT_NE(why.find("surprisal"), std::string::npos) << why;
  ASSERT_EQ(reported(s, surprisal.data(), nullptr), KVS_OK) << engine.error();
  ASSERT_EQ(Build(engine, s, nullptr, &built, &why), KVS_OK) << why;
  EXPECT_GT(built.extents, 0u);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_P(BuildTest, AnotherPlansExtentsAreFoundByTheNextPrompt) {
  const std::vector<int32_t> prompt = Prompt(700, 5);
  Engine engine(abi(), daemon_.socket());
  const kvs_sequence full = engine.Prefill("full", prompt);
  kvs_build_result built;
  ASSERT_EQ(Build(engine, full, kPacked, &built), KVS_OK) << engine.error();
  EXPECT_GT(built.extents, 0u);
  const uint64_t runs = admin_.Status().recompressions();
  const kvs_sequence s = engine.Prefill(kPacked, prompt);
  ASSERT_NE(s, 0u) << engine.error();
  ASSERT_EQ(Settle(engine, s), KVS_OK) << engine.error();
  EXPECT_EQ(admin_.Show(s).sequence().extents(), built.extents);
  EXPECT_EQ(admin_.Status().recompressions(), runs) << "packed again";
  EXPECT_EQ(admin_.Status().artefact_hits(), 1u);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_P(BuildTest, RecompressIsAskedFollowedAndRefused) {
  const std::vector<int32_t> prompt = Prompt(900, 6);
  Engine engine(abi(), daemon_.socket());
  const kvs_sequence full = engine.Prefill("full", prompt);
  EXPECT_EQ(abi().kvs_sequence_recompress(engine.session(), full), KVS_FAILED_PRECONDITION);
  EXPECT_STREQ(abi().kvs_error_reason(), "RECOMPRESS_RAW");
  v1::RecompressSequenceResponse last;
  EXPECT_EQ(admin_.Recompress(full, &last).reason(), "RECOMPRESS_RAW");
  EXPECT_EQ(admin_.Recompress(4711, &last).reason(), "SEQUENCE_UNKNOWN");
  kvs_sequence s = engine.Prefill(kPacked, prompt);
  ASSERT_EQ(Recompress(engine, s), KVS_OK) << engine.error();
  EXPECT_GT(admin_.Show(s).sequence().extents(), 0u);
  EXPECT_EQ(admin_.Work().work_size(), 0);
  s = engine.Prefill(kPacked, Prompt(900, 7));
  // The operator's request does not come behind what is still in the ring.
  ASSERT_EQ(abi().kvs_ping(engine.session()), KVS_OK);
  EXPECT_TRUE(admin_.Recompress(s, &last).ok());
  EXPECT_TRUE(last.done());
  EXPECT_EQ(last.extents(), admin_.Show(s).sequence().extents());
  EXPECT_GT(last.extents(), 0u);
  EXPECT_EQ(admin_.Audit(), "");
}

INSTANTIATE_TEST_SUITE_P(Transports, BuildTest, ::testing::Values(&Linked, &Remote),
                         [](const auto& transport) {
                           return transport.index == 0 ? "Linked" : "Remote";
                         });

// The raw pages that the sequence has, by position; released ones are empty.
std::vector<std::string> RawPages(const Engine& engine, kvs_sequence s) {
  std::vector<kvs_page> pages(256);
  size_t n = 0;
  EXPECT_EQ(Linked().kvs_page_table(engine.session(), s, pages.data(), pages.size(), &n, nullptr),
            KVS_OK);
  std::vector<std::string> bytes;
  const size_t page_bytes = 2 * 2 * 2 * 16 * 64 * 4;  // keys, values; layers; heads; rows of f32
  for (size_t i = 0; i < n; ++i) {
    const auto* at = static_cast<const char*>(pages[i].address);
    bytes.push_back(at == nullptr ? std::string() : std::string(at, page_bytes));
  }
  return bytes;
}

int Rounds() {
  const char* const text = std::getenv("KVS_CANCEL_ROUNDS");
  return text == nullptr ? 20 : std::atoi(text);
}

// Wherever a run is when it is cancelled, raw rows are what they were, and asking again ends where
// nobody cancelled. A round has a prompt that nobody has (the last one's is evicted).
TEST(CancelTest, AtAnyMomentTheBitsAreTheSameAndNoPageIsLost) {
  using Clock = std::chrono::steady_clock;
  const char* const given = std::getenv("KVS_TEST_SEED");
  const auto seed = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                                     : std::random_device{}();
  std::printf("KVS_TEST_SEED=%u, %d rounds\n", seed, Rounds());
  std::mt19937 random(seed);
  DaemonProcess daemon;
  Operator admin(daemon.socket());
  Engine engine(Linked(), daemon.socket());
  const std::vector<int32_t> prompt = Prompt(2000, 8);
  const auto decode = [&](kvs_sequence s) {
    std::vector<std::vector<float>> all;
    for (int32_t id = 1; id <= 2; ++id) {
      auto outs = engine.Run(s, {id}, static_cast<uint32_t>(prompt.size()) + id - 1);
      EXPECT_FALSE(outs.empty()) << engine.error();
      all.insert(all.end(), outs.begin(), outs.end());
    }
    return all;
  };
  const auto forget = [&](kvs_sequence s) {
    ASSERT_EQ(Linked().kvs_sequence_close(engine.session(), s), KVS_OK);
    ASSERT_TRUE(Eventually([&] {
      (void)admin.Evict();
      return admin.HeldBytes() == 0;
    })) << admin.HeldBytes();
  };
  kvs_sequence s = engine.Prefill(kPacked, prompt);
  ASSERT_NE(s, 0u) << engine.error();
  Clock::time_point begin = Clock::now();
  ASSERT_EQ(Recompress(engine, s), KVS_OK) << engine.error();
  const auto whole = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
  const uint32_t extents = admin.Show(s).sequence().extents();
  ASSERT_GT(extents, 3u);
  const auto want = decode(s);
  const std::vector<std::string> rows = [&] {
    Engine full(Linked(), daemon.socket(), {.digest = "full"});
    return RawPages(full, full.Prefill("full", prompt));
  }();
  forget(s);
  int running = 0, unfinished = 0;
  for (int i = 0; i < Rounds(); ++i) {
    SCOPED_TRACE("round " + std::to_string(i));
    s = engine.Prefill(kPacked, prompt);
    ASSERT_NE(s, 0u) << engine.error();
    std::uniform_int_distribution<int64_t> moment(0, whole.count());
    // Some at once, which is early for sure.
    if (i % 4 != 0) std::this_thread::sleep_for(std::chrono::microseconds(moment(random)));
    running += admin.CancelWork(s).was_running();
    // The run sees it soon; from then on nothing happens.
    ASSERT_TRUE(Eventually([&] {
      const auto work = admin.Work();
      return work.work_size() == 0 || work.work(0).state() == "cancelled";
    }));
    unfinished += admin.Work().work_size();
    ASSERT_EQ(admin.Audit(), "");
    const std::vector<std::string> now = RawPages(engine, s);
    ASSERT_EQ(now.size(), rows.size());
    for (size_t page = 0; page < now.size(); ++page) {
      if (now[page].empty()) continue;
      ASSERT_TRUE(now[page] == rows[page]) << "page " << page;
    }
    ASSERT_EQ(Recompress(engine, s), KVS_OK) << engine.error();
    EXPECT_EQ(admin.Show(s).sequence().extents(), extents);
    ASSERT_EQ(decode(s), want);
    ASSERT_EQ(admin.Audit(), "");
    forget(s);
  }
  std::printf("%d cancelled a run, %d left work\n", running, unfinished);
  EXPECT_GT(unfinished, 0) << "every cancel came too late to say anything";
}

// What waits behind another sequence's run is withdrawn, and offered again by a commit.
TEST(CancelTest, WhatIsQueuedIsWithdrawn) {
  DaemonProcess daemon({"--set", "work.threads=1"});
  Operator admin(daemon.socket());
  Engine engine(Linked(), daemon.socket());
  std::vector<kvs_sequence> all;
  for (int i = 0; i < 4; ++i) all.push_back(engine.Prefill(kPacked, Prompt(2000, 20 + i)));
  const kvs_sequence last = all.back();
  // The end of its prompt is an event: it may not have been handled yet.
  ASSERT_TRUE(Eventually([&] {
    const auto work = admin.Work();
    return std::ranges::any_of(work.work(), [&](const auto& w) { return w.sequence() == last; });
  }));
  (void)admin.CancelWork(last);
  if (Settle(engine, last) != KVS_OK) {  // else the workers were faster
    EXPECT_STREQ(Linked().kvs_error_reason(), "WORK_CANCELLED");
  }
  EXPECT_FALSE(engine.Run(last, {1}, 2000).empty());
  EXPECT_EQ(Settle(engine, last), KVS_OK) << engine.error();
  EXPECT_GT(admin.Show(last).sequence().extents(), 0u);
  EXPECT_EQ(admin.Audit(), "");
}

}  // namespace
}  // namespace kvstrata::testing
