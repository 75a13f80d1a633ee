// SPDX-License-Identifier: Apache-2.0
// libkvstrata.so against a real kvstratad, through the C++ wrapper.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <thread>

#include "kvstrata/client.h"
#include "tests/client/toy_engine.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::client::testing {
namespace {

using kvstrata::testing::DaemonProcess;
using ::testing::HasSubstr;

#define ASSERT_GOOD(result) \
  if (auto&& good_ = (result); !good_) FAIL() << #result << ": " << good_.error().ToString()

template <typename R>
void ExpectRefused(const R& result, int code, const char* reason) {
  ASSERT_FALSE(result) << "not refused: " << reason;
  EXPECT_EQ(result.error().code, code) << result.error().ToString();
  EXPECT_EQ(result.error().reason, reason) << result.error().message;
}

kvs::Session AttachTo(const DaemonProcess& daemon, uint32_t timeout_ms = 0) {
  const std::string socket = daemon.socket();
  auto session = kvs::Session::Attach({.socket = socket.c_str(),
                                       .client_name = "linked_test",
                                       .backend = "",
                                       .threads = 2,
                                       .timeout_ms = timeout_ms});
  EXPECT_TRUE(session) << session.error().ToString();
  return session ? *std::move(session) : kvs::Session(nullptr);
}

class LinkedTest : public ::testing::Test {
 protected:
  LinkedTest() : session_(AttachTo(daemon_)) {
    auto model = session_.Register(ToyModel());
    EXPECT_TRUE(model) << model.error().ToString();
    if (model) model_ = *model;
  }

  // Opens a sequence and runs its first `n` tokens.
  std::optional<kvs::Sequence> Prefilled(uint64_t seed, int n, const std::string& plan = "full") {
    auto sequence = session_.Open(model_, plan, Ids(seed, 0, n));
    EXPECT_TRUE(sequence) << sequence.error().ToString();
    if (!sequence) return std::nullopt;
    const int held = static_cast<int>(sequence->held());
    RunStep(session_, *sequence, seed, held, n - held);
    return *std::move(sequence);
  }

  DaemonProcess daemon_{{"--set", "pool.device_bytes=64MiB", "--set", "pool.host_bytes=16MiB"}};
  kvs::Session session_;
  kvs::Model model_ = 0;
};

class PlanTest : public LinkedTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(PlanTest, PrefillAndDecodeAgreeWithTheOracle) {
  constexpr uint64_t kSeed = 20261121;
  constexpr int kPrompt = 300, kSteps = 40;
  RecordProperty("seed", static_cast<int>(kSeed));
  auto sequence = session_.Open(model_, GetParam(), Ids(kSeed, 0, kPrompt));
  ASSERT_GOOD(sequence);
  EXPECT_EQ(sequence->held(), 0u);
  ExpectOracle(RunStep(session_, *sequence, kSeed, 0, 256), kSeed, 0, 256);
  ExpectOracle(RunStep(session_, *sequence, kSeed, 256, kPrompt - 256), kSeed, 256, kPrompt - 256);
  ASSERT_GOOD(sequence->PrefillDone());
  size_t attended = 0;
  for (int i = 0; i < kSteps; ++i) {
    const Answer a = RunStep(session_, *sequence, kSeed, kPrompt + i, 1);
    ASSERT_NO_FATAL_FAILURE(ExpectOracle(a, kSeed, kPrompt + i, 1));
    attended = a.attended[1][0].size();
    const float entropy = 1.5f;
    ASSERT_GOOD(sequence->Report(kPrompt + i, {}, {&entropy, 1}));
  }
  auto tokens = sequence->Tokens();
  ASSERT_GOOD(tokens);
  EXPECT_EQ(*tokens, static_cast<uint32_t>(kPrompt + kSteps));
  if (std::string(GetParam()) == "full") {
    EXPECT_EQ(attended, static_cast<size_t>(kPrompt + kSteps));
  } else {
    EXPECT_LT(attended, 200u);
    EXPECT_GT(attended, 8u);
  }
  ASSERT_GOOD(sequence->Settle());
  auto plan = sequence->Plan();
  ASSERT_GOOD(plan);
  EXPECT_THAT(*plan, HasSubstr("min_tokens"));
  auto status = sequence->Status();
  ASSERT_GOOD(status);
  EXPECT_FALSE(status->empty());
}

INSTANTIATE_TEST_SUITE_P(
    Plans, PlanTest,
    ::testing::Values("full", "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
                      "quest{budget = 64, min_tokens = 0}",
                      "bits{budget = 48, unit = 16, recent = 8, min_tokens = 0}",
                      "chess{page = 8, pages_per_chunk = 4, chunks_per_grid = 2, window = 2, "
                      "rho = [0.8, 0.5, 0.3], trigger = \"every\", every = 1, min_tokens = 0}"));

TEST_F(LinkedTest, ChunksAndSingleTokensGiveTheSameBits) {
  auto whole = session_.Open(model_, "quest{budget = 32, min_tokens = 0}");
  auto pieces = session_.Open(model_, "quest{budget = 32, min_tokens = 0}");
  ASSERT_GOOD(whole);
  ASSERT_GOOD(pieces);
  RunStep(session_, *whole, 5, 0, 90);
  for (int t = 0; t < 90; ++t) RunStep(session_, *pieces, 5, t, 1);
  ASSERT_GOOD(whole->PrefillDone());
  ASSERT_GOOD(pieces->PrefillDone());
  const Answer a = RunStep(session_, *whole, 5, 90, 1);
  const Answer b = RunStep(session_, *pieces, 5, 90, 1);
  EXPECT_EQ(a.attended, b.attended);
  EXPECT_EQ(a.out, b.out);
}

TEST_F(LinkedTest, APrefixIsHeldAndGivesTheSameBits) {
  const std::string plan = "quest{budget = 64, min_tokens = 0}";
  auto first = Prefilled(9, 100, plan);
  ASSERT_TRUE(first);
  ASSERT_GOOD(first->Settle());
  auto second = session_.Open(model_, plan, Ids(9, 0, 100));
  ASSERT_GOOD(second);
  EXPECT_EQ(second->held(), 96u);  // whole pages, at most n - 1
  auto exact = session_.Open(model_, plan, Ids(9, 0, 96));
  ASSERT_GOOD(exact);
  EXPECT_EQ(exact->held(), 80u);
  auto stranger = session_.Open(model_, plan, Ids(10, 0, 100));
  ASSERT_GOOD(stranger);
  EXPECT_EQ(stranger->held(), 0u);

  kvs::Session other = AttachTo(daemon_);  // maps the first session's arena read-only
  auto model = other.Register(ToyModel());
  ASSERT_GOOD(model);
  EXPECT_EQ(*model, model_);
  auto third = other.Open(*model, plan, Ids(9, 0, 100));
  ASSERT_GOOD(third);
  EXPECT_EQ(third->held(), 96u);

  RunStep(session_, *second, 9, 96, 4);
  RunStep(other, *third, 9, 96, 4);
  ASSERT_GOOD(first->PrefillDone());
  ASSERT_GOOD(second->PrefillDone());
  ASSERT_GOOD(third->PrefillDone());
  for (int t = 100; t < 140; ++t) {
    const Answer a = RunStep(session_, *first, 9, t, 1);
    const Answer b = RunStep(session_, *second, 9, t, 1);
    const Answer c = RunStep(other, *third, 9, t, 1);
    ASSERT_EQ(a.out, b.out) << t;
    ASSERT_EQ(a.out, c.out) << t;
    ASSERT_EQ(a.attended, c.attended) << t;
  }
}

TEST_F(LinkedTest, AForkSharesAndThenPartsWays) {
  const std::string plan = "quest{budget = 48, min_tokens = 0}";
  auto parent = Prefilled(21, 75, plan);
  ASSERT_TRUE(parent);
  ASSERT_GOOD(parent->PrefillDone());
  auto child = parent->Fork();
  ASSERT_GOOD(child);
  auto tokens = child->Tokens();
  ASSERT_GOOD(tokens);
  EXPECT_EQ(*tokens, 75u);
  // A sequence with the child's content that never shared a page with anyone after token 75.
  auto reference = Prefilled(21, 75, plan);
  ASSERT_TRUE(reference);
  ASSERT_GOOD(reference->PrefillDone());
  for (int t = 75; t < 110; ++t) {
    ASSERT_NO_FATAL_FAILURE(ExpectOracle(RunStep(session_, *parent, 21, t, 1), 21, t, 1));
    const Answer a = RunStep(session_, *child, 22, t, 1);
    const Answer b = RunStep(session_, *reference, 22, t, 1);
    ASSERT_EQ(a.out, b.out) << t;
    ASSERT_EQ(a.attended, b.attended) << t;
  }
  ASSERT_GOOD(child->Close());
  ExpectOracle(RunStep(session_, *parent, 21, 110, 1), 21, 110, 1);
}

TEST_F(LinkedTest, AForkInsideAStepTakesWhatWasCommitted) {
  auto parent = Prefilled(25, 75, "quest{budget = 48, min_tokens = 0}");
  ASSERT_TRUE(parent);
  ASSERT_GOOD(parent->PrefillDone());
  auto step = session_.Begin(*parent, Ids(25, 75, 30));
  ASSERT_GOOD(step);
  std::optional<kvs::Sequence> child;
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = RowsOf(Kind::kKey, 25, 75, 30, layer);
    const auto v = RowsOf(Kind::kValue, 25, 75, 30, layer);
    ASSERT_GOOD(
        step->Append(layer, {k.data(), 30, kKvHeads, kDim}, {v.data(), 30, kKvHeads, kDim}));
    if (layer != 0) continue;
    auto forked = parent->Fork();
    ASSERT_GOOD(forked);
    child = *std::move(forked);
  }
  ASSERT_GOOD(step->End());
  ASSERT_GOOD(parent->Settle());  // the daemon took the commit
  RunStep(session_, *child, 26, 75, 1);
  auto reference = Prefilled(25, 75, "quest{budget = 48, min_tokens = 0}");
  ASSERT_TRUE(reference);
  ASSERT_GOOD(reference->PrefillDone());
  RunStep(session_, *reference, 26, 75, 1);
  for (int t = 0; t < 20; ++t) {
    ASSERT_NO_FATAL_FAILURE(
        ExpectOracle(RunStep(session_, *parent, 25, 105 + t, 1), 25, 105 + t, 1));
    ASSERT_EQ(RunStep(session_, *child, 26, 76 + t, 1).out,
              RunStep(session_, *reference, 26, 76 + t, 1).out);
  }
  ASSERT_GOOD(parent->Settle());
  ASSERT_GOOD(child->Settle());
}

TEST_F(LinkedTest, ARaggedBatchOfManyPlans) {
  const uint64_t seeds[] = {31, 32, 33};
  const int lengths[] = {50, 17, 64};
  const char* plans[] = {"full", "window{n_sink = 2, n_recent = 8, min_tokens = 0}",
                         "quest{budget = 32, min_tokens = 0}"};
  std::vector<kvs::Sequence> batch, alone;
  for (int i = 0; i < 3; ++i) {
    for (auto* to : {&batch, &alone}) {
      auto s = session_.Open(model_, plans[i]);
      ASSERT_GOOD(s);
      RunStep(session_, *s, seeds[i], 0, lengths[i]);
      ASSERT_GOOD(s->PrefillDone());
      to->push_back(*std::move(s));
    }
  }
  std::vector<kvs::Member> members;
  std::vector<std::vector<int32_t>> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(Ids(seeds[i], lengths[i], i + 1));
  for (int i = 0; i < 3; ++i) members.push_back({batch[i].id(), ids[i]});
  auto step = session_.Begin(members);
  ASSERT_GOOD(step);
  std::vector<Answer> want;
  for (int i = 0; i < 3; ++i) {
    want.push_back(RunStep(session_, alone[i], seeds[i], lengths[i], i + 1));
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    std::vector<float> k, v, q, out(6 * kQueryHeads * kDim), expected;
    for (int i = 0; i < 3; ++i) {
      const auto pack = [&](Kind kind, std::vector<float>* to) {
        const auto rows = RowsOf(kind, seeds[i], lengths[i], i + 1, layer);
        to->insert(to->end(), rows.begin(), rows.end());
      };
      pack(Kind::kKey, &k);
      pack(Kind::kValue, &v);
      pack(Kind::kQuery, &q);
      expected.insert(expected.end(), want[i].out[layer].begin(), want[i].out[layer].end());
    }
    ASSERT_GOOD(step->Append(layer, {k.data(), 6, kKvHeads, kDim}, {v.data(), 6, kKvHeads, kDim}));
    ASSERT_GOOD(
        step->Attend(layer, {q.data(), 6, kQueryHeads, kDim}, {out.data(), 6, kQueryHeads, kDim}));
    EXPECT_EQ(out, expected) << "layer " << layer;
  }
  ASSERT_GOOD(step->End());
}

// The library remembers parsed plans, but not any number of them.
TEST_F(LinkedTest, OfManyPlansEachSequenceHasItsOwn) {
  for (int i = 0; i < 140; ++i) {
    const int recent = 8 + i % 70;
    const std::string plan =
        "window{n_sink = 4, n_recent = " + std::to_string(recent) + ", min_tokens = 0}";
    if (i % 10 != 0) {
      ASSERT_GOOD(session_.Open(model_, plan));
      continue;
    }
    auto sequence = Prefilled(31, 100, plan);
    ASSERT_TRUE(sequence);
    ASSERT_GOOD(sequence->PrefillDone());
    const Answer a = RunStep(session_, *sequence, 31, 100, 1);
    EXPECT_EQ(a.attended[1][0].size(), static_cast<size_t>(4 + recent)) << i;
  }
}

TEST_F(LinkedTest, AStepThatEndsBadlyChangesNothing) {
  auto s = Prefilled(41, 30);
  ASSERT_TRUE(s);
  const auto ids = Ids(41, 30, 2);
  const auto wrong = RowsOf(Kind::kKey, 999, 0, 2, 0);
  {
    auto step = session_.Begin(*s, ids);
    ASSERT_GOOD(step);
    ASSERT_GOOD(
        step->Append(0, {wrong.data(), 2, kKvHeads, kDim}, {wrong.data(), 2, kKvHeads, kDim}));
    ExpectRefused(step->End(), KVS_FAILED_PRECONDITION, "LAYER_MISSING");
  }
  {
    auto step = session_.Begin(*s, ids);
    ASSERT_GOOD(step);
    ASSERT_GOOD(
        step->Append(0, {wrong.data(), 2, kKvHeads, kDim}, {wrong.data(), 2, kKvHeads, kDim}));
    // Dropped with the object.
  }
  auto tokens = s->Tokens();
  ASSERT_GOOD(tokens);
  EXPECT_EQ(*tokens, 30u);
  ExpectOracle(RunStep(session_, *s, 41, 30, 2), 41, 30, 2);
}

TEST_F(LinkedTest, SequencesThatCannotBeUsed) {
  auto s = Prefilled(51, 20);
  ASSERT_TRUE(s);
  const auto ids = Ids(51, 20, 1);
  ExpectRefused(session_.Open(model_ + 100, "full"), KVS_NOT_FOUND, "MODEL_UNKNOWN");
  ExpectRefused(session_.Open(model_, "ches"), KVS_INVALID_ARGUMENT, "PLAN_UNKNOWN");
  ExpectRefused(session_.Open(model_, "quest{codec = \"fp8\"}"), KVS_INVALID_ARGUMENT,
                "PLAN_OPTION_INVALID");

  kvs::Session other = AttachTo(daemon_);
  ASSERT_GOOD(other.Register(ToyModel()));
  ExpectRefused(other.Begin(*s, ids), KVS_NOT_FOUND, "SEQUENCE_UNKNOWN");
  EXPECT_EQ(kvs_sequence_close(other.get(), s->id()), KVS_NOT_FOUND);
  ExpectRefused(other.Open(model_ + 1, "full"), KVS_NOT_FOUND, "MODEL_UNKNOWN");

  auto second_model = session_.Register(ToyModel("other weights"));
  ASSERT_GOOD(second_model);
  EXPECT_NE(*second_model, model_);
  auto mixed = session_.Open(*second_model, "full");
  ASSERT_GOOD(mixed);
  const kvs::Member both[] = {{s->id(), ids}, {mixed->id(), ids}};
  ExpectRefused(session_.Begin(both), KVS_INVALID_ARGUMENT, "MODELS_MIXED");
  const kvs::Member twice[] = {{s->id(), ids}, {s->id(), ids}};
  ExpectRefused(session_.Begin(twice), KVS_FAILED_PRECONDITION, "SEQUENCE_BUSY");

  {
    auto step = session_.Begin(*s, ids);
    ASSERT_GOOD(step);
    ExpectRefused(session_.Begin(*s, ids), KVS_FAILED_PRECONDITION, "SEQUENCE_BUSY");
    EXPECT_EQ(kvs_sequence_close(session_.get(), s->id()), KVS_FAILED_PRECONDITION);
    ExpectRefused(s->Settle(), KVS_FAILED_PRECONDITION, "SEQUENCE_BUSY");
    ExpectRefused(s->PrefillDone(), KVS_FAILED_PRECONDITION, "SEQUENCE_BUSY");
  }
  const kvs_sequence id = s->id();
  ASSERT_GOOD(s->Close());
  EXPECT_EQ(kvs_sequence_close(session_.get(), id), KVS_NOT_FOUND);
  uint32_t tokens = 0;
  EXPECT_EQ(kvs_sequence_tokens(session_.get(), id, &tokens), KVS_NOT_FOUND);
  EXPECT_EQ(kvs_settle(session_.get(), id), KVS_NOT_FOUND);
  const kvs::Member closed[] = {{id, ids}};
  ExpectRefused(session_.Begin(closed), KVS_NOT_FOUND, "SEQUENCE_UNKNOWN");
}

TEST_F(LinkedTest, ThePageTableShowsTheKeys) {
  auto s = Prefilled(61, 40);
  ASSERT_TRUE(s);
  ASSERT_GOOD(s->Settle());
  std::vector<kvs_page> pages(8);
  size_t n = 0;
  uint64_t version = 0;
  ASSERT_EQ(kvs_page_table(session_.get(), s->id(), pages.data(), pages.size(), &n, &version), 0);
  ASSERT_EQ(n, 3u);
  EXPECT_GT(version, 0u);
  EXPECT_EQ(pages[0].flags & 2, 2u);  // full pages are sealed
  EXPECT_EQ(pages[2].flags & 2, 0u);
  // [layer][K|V][kv_head][slot][dim]
  const auto* page = static_cast<const float*>(pages[1].address);
  for (int layer = 0; layer < kLayers; ++layer) {
    const float* row = page + ((layer * 2 + 1) * kKvHeads + 1) * 16 * kDim + 3 * kDim;
    for (int c = 0; c < kDim; ++c) {
      ASSERT_EQ(row[c], Noise(Kind::kValue, 61, 16 + 3, layer, 1, c));
    }
  }
  kvs_array array{};
  EXPECT_EQ(kvs_inspect(session_.get(), s->id(), "no such", &array), KVS_NOT_FOUND);
  const float entropy[] = {1, 2};
  ASSERT_GOOD(s->Report(38, {}, entropy));
  ASSERT_EQ(kvs_inspect(session_.get(), s->id(), "entropy", &array), KVS_OK);
  ASSERT_EQ(array.dims, 1);
  EXPECT_EQ(array.shape[0], 40);
  EXPECT_EQ(static_cast<float*>(array.data)[39], 2.0f);
  kvs_array_free(&array);
  ExpectRefused(s->Report(39, {}, entropy), KVS_INVALID_ARGUMENT, "REPORT_RANGE");
}

TEST_F(LinkedTest, ThreadsOnDifferentSequences) {
  constexpr int kThreads = 6;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const uint64_t seed = 700 + i;
      auto s = Prefilled(seed, 33 + i, i % 2 == 0 ? "full" : "quest{budget = 32, min_tokens = 0}");
      ASSERT_TRUE(s);
      ASSERT_GOOD(s->PrefillDone());
      for (int t = 33 + i; t < 80; ++t) {
        ASSERT_NO_FATAL_FAILURE(ExpectOracle(RunStep(session_, *s, seed, t, 1), seed, t, 1));
      }
      ASSERT_GOOD(s->Settle());
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST_F(LinkedTest, AForkedChildIsRefusedAndTheParentGoesOn) {
  auto s = Prefilled(81, 20);
  ASSERT_TRUE(s);
  auto step = session_.Begin(*s, Ids(81, 20, 1));
  ASSERT_GOOD(step);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = kvs_ping(session_.get()) == KVS_FAILED_PRECONDITION &&
                         std::strcmp(kvs_error_reason(), "FORKED") == 0;
    kvs_step_abort(step->get());
    kvs_detach(session_.get());
    kvs_session* own = nullptr;
    const bool attaches =
        kvs_attach(daemon_.socket().c_str(), nullptr, &own) == KVS_OK && kvs_ping(own) == KVS_OK;
    kvs_detach(own);
    _exit(refused ? attaches ? 0 : 2 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  { const kvs::Step dropped = *std::move(step); }
  ExpectOracle(RunStep(session_, *s, 81, 20, 1), 81, 20, 1);
}

TEST_F(LinkedTest, ADaemonThatHangsMeetsTheDeadline) {
  kvs::Session patient = AttachTo(daemon_, 50);
  kill(daemon_.pid(), SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(daemon_.pid(), &status, WUNTRACED), daemon_.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  ExpectRefused(patient.Ping(), KVS_DEADLINE_EXCEEDED, "DEADLINE");
  kill(daemon_.pid(), SIGCONT);
  // Its late answer is dropped; the session works on.
  for (int i = 0; i < 1000 && !patient.Ping(); ++i) {
  }
  ASSERT_GOOD(patient.Ping());
  ASSERT_GOOD(session_.Ping());
}

TEST_F(LinkedTest, TheDaemonsDeathIsAnErrorAndNoHang) {
  auto s = Prefilled(91, 40);
  ASSERT_TRUE(s);
  kvs_page page{};
  size_t n = 0;
  ASSERT_EQ(kvs_page_table(session_.get(), s->id(), &page, 1, &n, nullptr), 0);
  auto step = session_.Begin(*s, Ids(91, 40, 1));
  ASSERT_GOOD(step);
  daemon_.Stop(SIGKILL);
  // Mapped memory goes on: the open step runs, its commit fails.
  const auto rows = RowsOf(Kind::kKey, 91, 40, 1, 0), q = RowsOf(Kind::kQuery, 91, 40, 1, 0);
  std::vector<float> out(q.size());
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_GOOD(
        step->Append(layer, {rows.data(), 1, kKvHeads, kDim}, {rows.data(), 1, kKvHeads, kDim}));
    ASSERT_GOOD(
        step->Attend(layer, {q.data(), 1, kQueryHeads, kDim}, {out.data(), 1, kQueryHeads, kDim}));
  }
  ExpectRefused(step->End(), KVS_UNAVAILABLE, "DAEMON_GONE");
  EXPECT_EQ(*static_cast<const float*>(page.address), Noise(Kind::kKey, 91, 0, 0, 0, 0));
  ExpectRefused(session_.Ping(), KVS_UNAVAILABLE, "DAEMON_GONE");
  ExpectRefused(session_.Begin(*s, Ids(91, 40, 1)), KVS_UNAVAILABLE, "DAEMON_GONE");
  ExpectRefused(session_.Open(model_, "full"), KVS_UNAVAILABLE, "DAEMON_GONE");
  ExpectRefused(s->Fork(), KVS_UNAVAILABLE, "DAEMON_GONE");
  ExpectRefused(s->Settle(), KVS_UNAVAILABLE, "DAEMON_GONE");
  auto tokens = s->Tokens();
  ASSERT_GOOD(tokens);
  EXPECT_EQ(*tokens, 40u);
  const std::string socket = daemon_.socket();
  ExpectRefused(kvs::Session::Attach({.socket = socket.c_str(),
                                      .client_name = "",
                                      .backend = "",
                                      .threads = 0,
                                      .timeout_ms = 0}),
                KVS_UNAVAILABLE, "DAEMON_UNREACHABLE");
}

TEST(Exhaustion, WhatIsReservedIsThereWhenAllElseIsTaken) {
  DaemonProcess daemon({"--set", "pool.device_bytes=1MiB", "--set", "pool.host_bytes=1MiB"});
  kvs::Session session = AttachTo(daemon);
  auto model = session.Register(ToyModel());
  ASSERT_GOOD(model);
  auto room = session.Capacity(*model);
  ASSERT_GOOD(room);
  // A page is 32 KiB: both pools together hold 64 of them, 1024 tokens; four are kept ahead.
  EXPECT_EQ(room->device.free.tokens, 512u);
  EXPECT_EQ(room->host.after_eviction.bytes, uint64_t{1} << 20);
  EXPECT_EQ(room->open_tokens, 960u);
  auto running = session.Open(*model, "full", Ids(1, 0, 64), {.reserve_tokens = 640});
  ASSERT_GOOD(running);
  std::vector<kvs::Sequence> others;
  for (auto s = session.Open(*model, "full"); s; s = session.Open(*model, "full")) {
    others.push_back(*std::move(s));
    ASSERT_LT(others.size(), 64u);
  }
  EXPECT_EQ(session.Capacity(*model)->open_tokens, 0u);
  RunStep(session, *running, 1, 0, 600);
  ExpectOracle(RunStep(session, *running, 1, 600, 40), 1, 600, 40);
  auto beyond = session.Begin(*running, Ids(1, 640, 200));
  ExpectRefused(beyond, KVS_RESOURCE_EXHAUSTED, "POOL_EXHAUSTED");
}

TEST(Exhaustion, AFullPoolIsAClearErrorAndRunningSequencesGoOn) {
  DaemonProcess daemon({"--set", "pool.device_bytes=1MiB", "--set", "pool.host_bytes=1MiB"});
  kvs::Session session = AttachTo(daemon);
  auto model = session.Register(ToyModel());
  ASSERT_GOOD(model);
  auto running = session.Open(*model, "full", Ids(1, 0, 64));
  ASSERT_GOOD(running);
  RunStep(session, *running, 1, 0, 64);
  // A page is 32 KiB: both pools together hold 64 of them, 1024 tokens.
  auto too_long = session.Open(*model, "full", Ids(2, 0, 5000));
  ExpectRefused(too_long, KVS_RESOURCE_EXHAUSTED, "POOL_EXHAUSTED");
  std::vector<kvs::Sequence> others;
  for (uint64_t seed = 3;; ++seed) {
    auto s = session.Open(*model, "full", Ids(seed, 0, 128));
    if (!s) {
      EXPECT_EQ(s.error().code, KVS_RESOURCE_EXHAUSTED) << s.error().ToString();
      break;
    }
    others.push_back(*std::move(s));
    ASSERT_LT(others.size(), 20u);
  }
  const auto ids = Ids(1, 64, 2000);
  const kvs_step_member members[] = {{others[0].id(), ids.data(), 1},
                                     {running->id(), ids.data(), 2000}};
  int32_t codes[2] = {-1, -1};
  kvs_step* step = nullptr;
  EXPECT_EQ(kvs_step_begin(session.get(), members, 2, nullptr, &step, codes),
            KVS_RESOURCE_EXHAUSTED);
  EXPECT_EQ(codes[0], KVS_OK);
  EXPECT_EQ(codes[1], KVS_RESOURCE_EXHAUSTED);
  ExpectOracle(RunStep(session, *running, 1, 64, 1), 1, 64, 1);
  others.clear();
  auto again = session.Open(*model, "full", Ids(99, 0, 128));
  ASSERT_GOOD(again);
  RunStep(session, *again, 99, 0, 128);
}

}  // namespace
}  // namespace kvstrata::client::testing
