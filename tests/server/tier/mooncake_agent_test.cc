// SPDX-License-Identifier: Apache-2.0
// The agent's process and what it may do to the daemon: it does not answer, dies, cannot be
// started, sends nonsense; and a store that returns other bytes than were put. The agent is the
// one that is shipped, the store below it one of files.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <functional>
#include <future>
#include <optional>

#include "server/tier/blocking_calls.h"
#include "tests/server/tier/mooncake_store.h"
#include "tests/server/tier/redis_tiers.h"

namespace kvstrata {
namespace {

using std::chrono::milliseconds;
using Sizes = std::vector<uint64_t>;

constexpr uint64_t kMemory = uint64_t{64} << 20;

Deadline In(milliseconds time) { return std::chrono::steady_clock::now() + time; }
std::string NameOf(const std::string& key, uint32_t stripe = 0) {
  return TestFormat().NameOf(key, "", stripe);
}
std::string HeadOf(const std::string& key) {
  std::string name = NameOf(key);
  return name.replace(name.size() - 1, 1, "h");
}

class MooncakeAgentTest : public ::testing::Test {
 protected:
  void Open() {
    tier_ = OpenMooncake(options_, TestFormat());
    ASSERT_TRUE(AwaitReady(*tier_)) << tier_->Stats().illness;
  }
  Status PutValue(const std::string& key, const Sizes& sizes, uint64_t version = 0) {
    TierPut put = PutOf(key, ValueOf(key, version, sizes));
    PutAndWait(tier_.get(), {&put, 1}, Soon());
    return put.status;
  }
  // INTERNAL where it is OK and has other bytes.
  Status GetValue(const std::string& key, const Sizes& sizes,
                  std::optional<Deadline> deadline = {}) {
    const AlignedBuffers into(sizes);
    TierGet get{key, into.buffers(), into.owner(), {}};
    GetAndWait(tier_.get(), {&get, 1}, deadline.value_or(Soon()));
    const bool wrong = get.status.ok() && !SameBytes(into, ValueOf(key, 0, sizes));
    return wrong ? Internal("TEST", "other bytes") : get.status;
  }
  MooncakeAgentStats Agent() const { return tier_->Agent(); }
  // An agent other than the one with that number serves.
  bool Restarted(pid_t before) const {
    return Becomes([&] { return Agent().ready && Agent().pid != before; });
  }

  MooncakeFolder store_;
  MooncakeTierOptions options_ = TestMooncake();
  std::unique_ptr<MooncakeValueTier> tier_;
};

TEST_F(MooncakeAgentTest, LargeValuesComeBackWholeSealedOrNot) {
  for (const remote::Seal seal : {remote::Seal::kNone, remote::Seal::kGcm}) {
    tier_ = OpenMooncake(options_, TestFormat("tenant", seal));
    ASSERT_TRUE(AwaitReady(*tier_));
    const Sizes sizes = {uint64_t{5} << 20, 7, uint64_t{9} << 20};  // four stripes
    ASSERT_TRUE(PutValue("large", sizes).ok());
    EXPECT_TRUE(GetValue("large", sizes).ok());
    EXPECT_EQ(Agent().held_bytes, 0u);
  }
}

TEST_F(MooncakeAgentTest, AProbeReadsHeads) {
  Open();
  ASSERT_TRUE(PutValue("a", {10, 5000}).ok());
  ASSERT_TRUE(PutValue("b", {20}).ok());
  const auto other = OpenMooncake(options_, TestFormat());  // saw nothing of them
  ASSERT_TRUE(AwaitReady(*other));
  store_.Flip(HeadOf("b"), 200);
  std::vector<TierProbe> probes = {{"a", {}}, {"b", {}}, {"c", {}}};
  std::promise<void> end;
  other->Probe(probes, {Soon(), {}, [&end] { end.set_value(); }});
  end.get_future().wait();
  EXPECT_TRUE(std::ranges::equal(probes[0].sizes.all(), Sizes{10, 5000}));
  EXPECT_TRUE(probes[1].sizes.empty()) << "its head is damaged";
  EXPECT_TRUE(probes[2].sizes.empty());
}

TEST_F(MooncakeAgentTest, ItCountsWhatBecameOfWhatWasAskedFor) {
  Open();
  ASSERT_TRUE(PutValue("k", {1000}).ok());
  EXPECT_EQ(Agent().exists.absent, 1u);
  EXPECT_EQ(Agent().put_bytes, 2 * remote::kHeaderBytes + 1000) << "a stripe and a head";
  ASSERT_TRUE(GetValue("k", {1000}).ok());
  EXPECT_EQ(GetValue("none", {1000}).code(), Code::kNotFound);
  EXPECT_EQ(Agent().gets.hits, 1u);
  EXPECT_EQ(Agent().gets.absent, 1u);
  EXPECT_EQ(Agent().got_bytes, remote::kHeaderBytes + 1000);
  const MooncakePing ping = tier_->PingAndWait(Soon());
  EXPECT_TRUE(ping.status.ok()) << ping.status.ToString();
  EXPECT_GT(ping.round_trip.count(), 0);
  EXPECT_EQ(Agent().exists.absent, 2u);
  EXPECT_EQ(Agent().calls, Agent().times.count());
  EXPECT_EQ(Agent().openings, 0u);
}

// --- an agent that does not answer -----------------------------------------------------------

TEST_F(MooncakeAgentTest, MemoryOfALateCallStaysWithTheAgentUntilItAnswers) {
  Open();
  ASSERT_TRUE(PutValue("k", {100000}).ok());
  store_.Hold();
  EXPECT_EQ(GetValue("k", {100000}, In(milliseconds(20))).reason(), "MOONCAKE_SLOW");
  EXPECT_GE(Agent().held_bytes, 100000u);
  store_.Release();
  EXPECT_TRUE(Becomes([&] { return Agent().held_bytes == 0; }));
  EXPECT_TRUE(GetValue("k", {100000}).ok());
}

TEST_F(MooncakeAgentTest, AKilledAgentHeldAtMostItsMemoryAndAllIsBack) {
  Open();
  const Sizes sizes = {uint64_t{4} << 20};
  ASSERT_TRUE(PutValue("k", sizes).ok());
  store_.Hold();
  uint64_t most = 0;
  EXPECT_TRUE(Becomes([&] {
    const AlignedBuffers into(sizes);
    std::vector<TierGet> gets(2, {"k", into.buffers(), into.owner(), {}});
    GetAndWait(tier_.get(), gets, In(milliseconds(50)));
    EXPECT_FALSE(gets[0].status.ok());
    most = std::max(most, Agent().held_bytes);
    return gets[0].status.reason() == "MOONCAKE_HELD";
  }));
  EXPECT_GT(most, kMemory / 2);
  EXPECT_LE(Agent().most_held_bytes, kMemory);
  EXPECT_GE(Agent().most_held_bytes, most);
  const pid_t before = Agent().pid;
  ASSERT_EQ(kill(before, SIGKILL), 0);
  EXPECT_TRUE(Becomes([&] { return Agent().held_bytes == 0; }));
  ASSERT_TRUE(Restarted(before));
  EXPECT_EQ(Agent().last_error, "it was ended by signal 9");
  EXPECT_GT(Agent().gets.late + Agent().gets.lost, 0u);
  EXPECT_EQ(Agent().starts, 2u);
  store_.Release();
  EXPECT_TRUE(GetValue("k", sizes).ok());
  EXPECT_EQ(tier_->Stats().illness, "");
}

TEST_F(MooncakeAgentTest, ACallUnderWhichTheAgentDiesEndsAtOnce) {
  Open();
  ASSERT_TRUE(PutValue("k", {100}).ok());
  store_.Hold();
  const AlignedBuffers into(Sizes{100});
  TierGet get{"k", into.buffers(), into.owner(), {}};
  std::promise<void> end;
  tier_->Get({&get, 1},
             {Deadline::clock::now() + std::chrono::hours(1), {}, [&] { end.set_value(); }});
  ASSERT_TRUE(Becomes([&] { return Agent().held_bytes != 0; }));
  kill(Agent().pid, SIGKILL);
  ASSERT_EQ(end.get_future().wait_for(std::chrono::minutes(1)), std::future_status::ready);
  EXPECT_EQ(get.status.reason(), "MOONCAKE_AGENT");
}

TEST_F(MooncakeAgentTest, AnAgentThatLeavesACallUnansweredIsReplaced) {
  options_.agent.stall_timeout = milliseconds(50);
  Open();
  const pid_t before = Agent().pid;
  store_.Hold();
  EXPECT_TRUE(Becomes([&] {
    (void)GetValue("k", {100}, In(milliseconds(50)));
    return Agent().pid != before;
  }));
  EXPECT_TRUE(Restarted(before));
  EXPECT_EQ(Agent().held_bytes, 0u);
}

TEST_F(MooncakeAgentTest, WhileCallsAreLateInARowItIsLeftAlone) {
  options_.agent.first_pause = options_.agent.longest_pause = std::chrono::hours(1);
  Open();
  store_.Hold();
  EXPECT_TRUE(Becomes([&] {
    return GetValue("k", {100}, In(milliseconds(50))).reason() == "MOONCAKE_LEFT_ALONE";
  }));
  EXPECT_GE(Agent().late, 8u);
  EXPECT_EQ(GetValue("k", {100}).reason(), "MOONCAKE_LEFT_ALONE");
  EXPECT_NE(tier_->Stats().illness, "");
  EXPECT_TRUE(Agent().left_alone);
}

// --- an agent that is none -------------------------------------------------------------------

TEST_F(MooncakeAgentTest, WithoutAPythonThereIsAnIllness) {
  options_.agent.python = "/nonexistent/python";
  tier_ = OpenMooncake(options_, TestFormat());
  EXPECT_TRUE(Becomes([&] { return Agent().starts >= 3; })) << "it is tried again";
  EXPECT_NE(tier_->Stats().illness.find("/nonexistent/python"), std::string::npos);
  EXPECT_EQ(GetValue("k", {100}).reason(), "MOONCAKE_AGENT");
}

TEST_F(MooncakeAgentTest, AStoreThatComesLaterIsFound) {
  store_.Refuse();
  tier_ = OpenMooncake(options_, TestFormat());
  EXPECT_TRUE(Becomes([&] { return Agent().starts >= 2; }));
  EXPECT_NE(tier_->Stats().illness.find("exit code 3"), std::string::npos)
      << tier_->Stats().illness;
  EXPECT_TRUE(Agent().left_alone);
  store_.Admit();
  EXPECT_TRUE(AwaitReady(*tier_));
  EXPECT_TRUE(PutValue("k", {100}).ok());
  EXPECT_EQ(tier_->Stats().illness, "");
}

TEST_F(MooncakeAgentTest, WhatIsNoAnswerEndsTheAgent) {
  const ScratchDir dir;
  const std::string ready = "s = socket.socket(fileno=3); s.send(struct.pack('<IIQ', 0, 0, 1)); ";
  const char* const answers[] = {"b'x'", "struct.pack('<IIQ', 9, 1, 7)",
                                 "struct.pack('<IIQq', 2, 1, 999, 0)",
                                 "struct.pack('<IIQ', 0, 0, 1)"};
  for (const char* answer : answers) {
    options_.agent.program = dir.path() + "/agent.py";
    std::ofstream(options_.agent.program) << "import socket, struct\n"
                                          << ready << "s.send(" << answer << "); s.recv(1)\n";
    tier_ = OpenMooncake(options_, TestFormat());
    EXPECT_TRUE(Becomes([&] { return Agent().starts >= 2; })) << answer;
    EXPECT_EQ(Agent().last_error, "what the agent sent is no answer") << answer;
  }
}

// --- a store that lies -----------------------------------------------------------------------

TEST_F(MooncakeAgentTest, WrongBytesAreAMissAndLeave) {
  Open();
  const Sizes sizes = {5000};
  const auto lie = [&](const std::string& key, const std::function<void()>& change) {
    ASSERT_TRUE(PutValue(key, sizes).ok());
    change();
    EXPECT_EQ(GetValue(key, sizes).code(), Code::kDataLoss) << key;
    EXPECT_FALSE(store_.Has(NameOf(key)) || store_.Has(HeadOf(key))) << key;
    EXPECT_EQ(GetValue(key, sizes).code(), Code::kNotFound) << key;
    EXPECT_TRUE(PutValue(key, sizes).ok());
    EXPECT_TRUE(GetValue(key, sizes).ok()) << key;
  };
  ASSERT_TRUE(PutValue("other", sizes, 1).ok());
  lie("flipped", [&] { store_.Flip(NameOf("flipped"), 600); });
  lie("header", [&] { store_.Flip(NameOf("header"), 70); });
  lie("another's", [&] { store_.Write(NameOf("another's"), store_.Read(NameOf("other"))); });
  lie("cut", [&] { store_.Write(NameOf("cut"), store_.Read(NameOf("cut")).substr(0, 3000)); });
  lie("empty", [&] { store_.Write(NameOf("empty"), ""); });
  lie("longer", [&] { store_.Write(NameOf("longer"), store_.Read(NameOf("longer")) + "x"); });
  lie("much longer",
      [&] { store_.Write(NameOf("much longer"), std::string(uint64_t{1} << 20, 'x')); });
  EXPECT_EQ(tier_->Stats().damaged, 7u);
}

TEST_F(MooncakeAgentTest, AValueWithoutOneOfItsStripesIsAMiss) {
  Open();
  const Sizes sizes = {uint64_t{9} << 20};
  ASSERT_TRUE(PutValue("k", sizes).ok());
  store_.Write(NameOf("k", 1), store_.Read(NameOf("k", 2)));
  EXPECT_EQ(GetValue("k", sizes).code(), Code::kDataLoss);
  EXPECT_FALSE(store_.Has(HeadOf("k")));
}

}  // namespace
}  // namespace kvstrata
