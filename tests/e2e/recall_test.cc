// SPDX-License-Identifier: Apache-2.0
// Recall audits of live sequences on a real daemon, on both transports: what they say, every way
// they end, and that a daemon which does not listen costs samples and no step.
// The numbers' definition: tests/kernels/shadow_attention_test.cc,
// tests/python/test_recall_audit.py.
#include <numeric>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::testing {
namespace {

constexpr const char* kWindow = "window{n_sink = 4, n_recent = 28, min_tokens = 0}";
constexpr const char* kPackedOnly =
    "{selector = \"full\", codec = \"packed\", max_loss = 1, keep = 32, min_tokens = 0, keep_raw = "
    "\"no\"}";
constexpr const char* kPackedOnHost =
    "{selector = \"full\", codec = \"packed\", max_loss = 1, keep = 32, min_tokens = 0, keep_raw = "
    "\"host\"}";

// Says 'd' and decodes until it is killed.
const bool kDecoding = RegisterRole("decoding", [](const std::string& socket, int) {
  Engine engine(Linked(), socket);
  const kvs_sequence s = engine.Prefill(kWindow, Prompt(100, 1));
  if (s == 0) return 1;
  Say('d');
  for (uint32_t at = 100;; ++at) {
    engine.Run(s, {1}, at);
    if (engine.code() != KVS_OK) return 2;
  }
});

class RecallTest : public ::testing::TestWithParam<const char*> {
 protected:
  const Abi& abi() const { return GetParam() == std::string("linked") ? Linked() : Remote(); }

  // Decodes `n` tokens.
  void Decode(int n) {
    for (int i = 0; i < n; ++i, ++at_) {
      engine_.Run(sequence_, {static_cast<int32_t>(at_)}, at_);
      ASSERT_EQ(engine_.code(), KVS_OK) << engine_.error();
    }
  }
  void Start(const char* plan, uint32_t prompt = 100) {
    sequence_ = engine_.Prefill(plan, Prompt(prompt, 3));
    ASSERT_NE(sequence_, 0u) << engine_.error();
    at_ = prompt;
  }
  // An audit that has begun: its first message is there.
  std::unique_ptr<RecallCall> Begun(uint32_t every, uint32_t steps, uint64_t timeout_ms = 60000) {
    auto call = admin_.Recall(sequence_, every, steps, timeout_ms);
    EXPECT_TRUE(call->Next());
    EXPECT_EQ(call->last().wanted_steps(), steps);
    EXPECT_EQ(call->last().steps(), 0u);
    return call;
  }

  DaemonProcess daemon_;
  Operator admin_{daemon_.socket()};
  Engine engine_{abi(), daemon_.socket()};
  kvs_sequence sequence_ = 0;
  uint32_t at_ = 0;
};

TEST_P(RecallTest, SamplesOneStepInEveryUntilItHasEnough) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  Decode(3);
  const auto call = Begun(4, 3);
  Decode(20);
  const kvstrata::Status ended = call->Await();
  ASSERT_TRUE(ended.ok()) << ended.ToString();
  const v1::AuditRecallResponse& r = call->last();
  EXPECT_EQ(r.sequence(), sequence_);
  EXPECT_EQ(r.plan(), "window");
  EXPECT_NE(r.plan_text().find("n_recent = 28"), std::string::npos) << r.plan_text();
  EXPECT_EQ(r.transport(), GetParam());
  EXPECT_EQ(r.every(), 4u);
  EXPECT_EQ(r.steps(), 3u);
  EXPECT_EQ(r.dropped_steps(), 0u);
  EXPECT_EQ(r.first_position(), 104u);
  EXPECT_EQ(r.last_position(), 112u);
  ASSERT_EQ(r.layers_size(), 2);
  EXPECT_EQ(r.layers(1).layer(), 1);
  EXPECT_EQ(r.all().layer(), -1);
  EXPECT_EQ(r.all().recall().samples(), 2u * 3 * 4);
  for (const v1::RecallRow& row : r.layers()) {
    EXPECT_EQ(row.recall().samples(), 3u * 4);
    EXPECT_GT(row.recall().min(), 0.05);
    EXPECT_LT(row.recall().max(), 0.95);
    EXPECT_GT(row.error().mean(), 0.1);
    EXPECT_LE(row.recall().p5(), row.recall().p50());
    const auto& bins = row.error().histogram();
    EXPECT_EQ(std::accumulate(bins.begin(), bins.end(), uint64_t{0}), 3u * 4);
  }
  EXPECT_EQ(r.recall_bounds_size(), r.all().recall().histogram_size() + 1);
  EXPECT_EQ(r.error_bounds_size(), r.all().error().histogram_size() + 1);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_P(RecallTest, FullLosesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start("full"));
  const auto call = Begun(1, 4);
  Decode(5);
  ASSERT_TRUE(call->Await().ok());
  EXPECT_EQ(call->last().all().recall().min(), 1.0);
  EXPECT_EQ(call->last().all().recall().mean(), 1.0);
  EXPECT_EQ(call->last().all().error().max(), 0.0);
}

TEST_P(RecallTest, OnlyCommittedDecodeStepsCount) {
  sequence_ = engine_.Open(kWindow, Prompt(100, 3));
  const auto call = Begun(1, 2, 60000);
  engine_.Run(sequence_, Prompt(100, 3), 0);  // the prompt, and one token before it is complete
  at_ = 100;
  Decode(1);
  ASSERT_EQ(abi().kvs_prefill_done(engine_.session(), sequence_), KVS_OK) << engine_.error();
  kvs_step* step = engine_.Begin(sequence_, {5});
  ASSERT_NE(step, nullptr) << engine_.error();
  engine_.Layer(step, 0, {5}, at_);
  engine_.Layer(step, 1, {5}, at_);
  abi().kvs_step_abort(step);
  engine_.Run(sequence_, {1, 2, 3}, at_);  // three tokens at once
  at_ += 3;
  Decode(2);
  ASSERT_TRUE(call->Await().ok());
  EXPECT_EQ(call->last().first_position(), 104u);
  EXPECT_EQ(call->last().last_position(), 105u);
}

TEST_P(RecallTest, ASecondIsRefusedAndACancelledOneEnds) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  const auto first = Begun(1, 8);
  Decode(1);
  ASSERT_TRUE(first->Next());  // the daemon has it
  const kvstrata::Status second = admin_.Recall(sequence_, 1, 1)->Await();
  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
  EXPECT_EQ(second.reason(), "RECALL_RUNNING");
  EXPECT_NE(second.message().find("1 of 8"), std::string::npos) << second.message();
  EXPECT_EQ(first->Cancel().reason(), "RPC_CANCELLED");
  std::unique_ptr<RecallCall> third;
  ASSERT_TRUE(Eventually([&] { return (third = admin_.Recall(sequence_, 1, 1))->Next(); }));
  Decode(1);
  EXPECT_TRUE(third->Await().ok());
  EXPECT_EQ(third->last().first_position(), 101u) << "a sample of the cancelled one";
}

TEST_P(RecallTest, TheDeadlineEndsItWithWhatThereIs) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  const auto call = Begun(1, 8, 2500);
  Decode(2);
  const kvstrata::Status ended = call->Await();
  EXPECT_EQ(ended.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(ended.reason(), "RECALL_TIMEOUT");
  EXPECT_NE(ended.message().find("2 of 8"), std::string::npos) << ended.message();
  EXPECT_NE(ended.message().find("2500 ms"), std::string::npos) << ended.message();
  EXPECT_EQ(call->last().all().recall().samples(), 2u * 2 * 4);
}

TEST_P(RecallTest, TheEndOfTheSequenceEndsIt) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  const auto call = Begun(1, 8);
  Decode(1);
  ASSERT_EQ(abi().kvs_sequence_close(engine_.session(), sequence_), KVS_OK);
  const kvstrata::Status ended = call->Await();
  EXPECT_EQ(ended.code(), Code::kAborted);
  EXPECT_EQ(ended.reason(), "SEQUENCE_CLOSED");
  EXPECT_NE(ended.message().find(std::to_string(sequence_)), std::string::npos);
  EXPECT_EQ(call->last().steps(), 1u);
  // The next sequence of its slot is not asked for anything.
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  Decode(2);
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_P(RecallTest, RawPagesThatAreGoneAreNoNumber) {
  ASSERT_NO_FATAL_FAILURE(Start(kPackedOnly, 500));
  ASSERT_EQ(abi().kvs_settle(engine_.session(), sequence_), KVS_OK) << engine_.error();
  const auto refused = admin_.Recall(sequence_, 1, 1);
  const kvstrata::Status status = refused->Await();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(status.reason(), "RECALL_RAW_GONE");
  EXPECT_NE(status.message().find("keep_raw = \"host\""), std::string::npos) << status.message();
  EXPECT_EQ(refused->last().steps(), 0u);
  EXPECT_FALSE(refused->last().has_all());
}

TEST_P(RecallTest, RawPagesThatGoWhileItRunsEndIt) {
  sequence_ = engine_.Open(kPackedOnly, Prompt(500, 3));
  engine_.Run(sequence_, Prompt(500, 3), 0);
  at_ = 500;
  const auto call = Begun(1, 8);  // before the prompt is complete nothing is released
  ASSERT_EQ(abi().kvs_prefill_done(engine_.session(), sequence_), KVS_OK) << engine_.error();
  ASSERT_EQ(abi().kvs_settle(engine_.session(), sequence_), KVS_OK) << engine_.error();
  Decode(1);
  EXPECT_EQ(call->Await().reason(), "RECALL_RAW_GONE");
  EXPECT_EQ(call->last().steps(), 0u);
}

TEST_P(RecallTest, ACodecThatKeepsRawIsMeasured) {
  ASSERT_NO_FATAL_FAILURE(Start(kPackedOnHost, 500));
  ASSERT_EQ(abi().kvs_settle(engine_.session(), sequence_), KVS_OK) << engine_.error();
  ASSERT_GT(admin_.Show(sequence_).sequence().extents(), 0u);
  const auto call = Begun(1, 3);
  Decode(3);
  const kvstrata::Status ended = call->Await();
  ASSERT_TRUE(ended.ok()) << ended.ToString();
  EXPECT_EQ(call->last().all().recall().min(), 1.0) << "every position is attended";
  EXPECT_GT(call->last().all().error().min(), 1e-3) << "half of the channels are not";
}

TEST_P(RecallTest, BadArgumentsNameTheField) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  const kvstrata::Status unknown = admin_.Recall(sequence_ + 1000, 1, 1)->Await();
  EXPECT_EQ(unknown.code(), Code::kNotFound);
  EXPECT_EQ(unknown.reason(), "SEQUENCE_UNKNOWN");
  EXPECT_NE(unknown.message().find(std::to_string(sequence_ + 1000)), std::string::npos);
  const auto expect = [&](uint32_t every, uint32_t steps, uint64_t ms, const char* words) {
    const kvstrata::Status s = admin_.Recall(sequence_, every, steps, ms)->Await();
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_EQ(s.reason(), "RECALL_OPTION");
    EXPECT_NE(s.message().find(words), std::string::npos) << s.message();
  };
  expect(65537, 1, 1000, "every is 65537; allowed: 1 .. 65536");
  expect(1, 1025, 1000, "steps is 1025; allowed: 1 .. 1024");
  expect(1, 1, 3'600'001, "timeout_us is 3600001000; allowed");
}

TEST_P(RecallTest, AStoppingDaemonSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Start(kWindow));
  const auto call = Begun(1, 8);
  kill(daemon_.pid(), SIGTERM);
  const kvstrata::Status ended = call->Await();
  EXPECT_EQ(ended.code(), Code::kUnavailable) << ended.ToString();
}

INSTANTIATE_TEST_SUITE_P(Transports, RecallTest, ::testing::Values("linked", "remote"),
                         [](const auto& test) { return std::string(test.param); });

TEST(RecallOfADeadClient, Ends) {
  DaemonProcess daemon;
  Operator admin(daemon.socket());
  ClientProcess client("decoding", daemon.socket());
  ASSERT_TRUE(client.Says('d'));
  const auto call = admin.Recall(1, 1, 1024);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(call->Next());
  EXPECT_GT(call->last().steps(), 0u);
  client.Kill();
  const kvstrata::Status ended = call->Await();
  EXPECT_EQ(ended.code(), Code::kAborted);
  EXPECT_EQ(ended.reason(), "SESSION_ENDED");
  EXPECT_NE(ended.message().find("died"), std::string::npos);
}

// A stopped daemon takes nothing out of the ring. Samples may use half of it, then they are lost
// and counted; steps go on.
TEST(RecallOfADeafDaemon, DropsSamplesAndNoStep) {
  DaemonProcess daemon({"--set", "session.headroom_tokens=256"});
  Operator admin(daemon.socket());
  ToyModel wide;
  wide.layers = 64;  // 128 KiB of samples a step: half of the ring takes 63
  wide.query_heads = 256;
  wide.kv_heads = 1;
  Engine engine(Linked(), daemon.socket(), wide);
  const kvs_sequence s = engine.Prefill("window{n_recent = 16, min_tokens = 0}", Prompt(16, 1));
  ASSERT_NE(s, 0u) << engine.error();
  const auto call = admin.Recall(s, 1, 64);  // as many as may be asked for of so wide a model
  ASSERT_TRUE(call->Next());
  ASSERT_EQ(kill(daemon.pid(), SIGSTOP), 0);
  int stopped = 0;
  ASSERT_EQ(waitpid(daemon.pid(), &stopped, WUNTRACED), daemon.pid());
  constexpr uint32_t kSteps = 67;
  for (uint32_t i = 0; i < kSteps && engine.code() == KVS_OK; ++i) engine.Run(s, {1}, 16 + i);
  kill(daemon.pid(), SIGCONT);
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  while (call->last().steps() < 63) ASSERT_TRUE(call->Next());
  EXPECT_EQ(call->last().steps(), 63u);
  EXPECT_EQ(call->last().dropped_steps(), 0u) << "it cannot know yet";
  engine.Run(s, {1}, 16 + kSteps);
  const kvstrata::Status ended = call->Await();
  ASSERT_TRUE(ended.ok()) << ended.ToString();
  EXPECT_EQ(call->last().dropped_steps(), kSteps - 63);
  EXPECT_EQ(call->last().last_position(), 16 + kSteps);
  EXPECT_EQ(call->last().all().recall().samples(), uint64_t{64} * 64 * 256);
  EXPECT_EQ(admin.Audit(), "");
}

}  // namespace
}  // namespace kvstrata::testing
