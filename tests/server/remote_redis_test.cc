// SPDX-License-Identifier: Apache-2.0
// TierRow over a real redis-server: two stores, without a daemon around them.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "server/tier/redis/redis_value_tier.h"
#include "server/tier/remote/remote_secret.h"
#include "server/work/tiers/tier_chain.h"
#include "tests/fakes/redis_process.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int32_t kPrompt = 16 * 300 + 5;  // two groups

std::unique_ptr<RedisValueTier> Connect(const RedisProcess& redis, remote::Seal seal,
                                        const char* secret) {
  RedisTierOptions options;
  options.servers = {redis.address()};
  remote::RemoteFormatOptions format;
  format.seal = seal;
  auto tier = RedisValueTier::Open(options, {*remote::RemoteSecret::Of(secret), "team", format});
  EXPECT_TRUE(tier.ok()) << tier.status().ToString();
  return std::move(*tier);
}

class Node {
 public:
  Node(const RedisProcess& redis, remote::Seal seal, std::chrono::microseconds deadline,
       const char* secret = "0123456789abcdef0123456789abcdef")
      : store_(NewStore(SmallPools(1024, 64))), tier_(Connect(redis, seal, secret)) {
    TierRowOptions options = TierRowOptions::Far();
    options.searches->deadline = options.searches->deadline_most = deadline;
    options.writer.write = TierWrite::kAll;
    pages_ = std::make_unique<TierRow>(options, store_.get(), tier_.get(), TierHooks{});
    tiers_ = std::make_unique<TierChain>(store_.get());
    tiers_->Add(pages_.get());
    session_ = std::make_unique<TestSession>(store_.get());
  }
  // Opens, computes what is not held, and waits until it is written; how much was held.
  uint32_t Serve() {
    const std::vector<int32_t> tokens = Tokens(kPrompt);
    std::promise<Result<OpenedSequence>> answer;
    store_->openings().OpenSequence(
        session_->id(), session_->model(), "full", tokens,
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    const Result<OpenedSequence> opened = answer.get_future().get();
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(session_.get(), *opened, tokens);
    EXPECT_TRUE(s.Append(std::span(tokens).subspan(opened->held_tokens)).ok());
    s.ExpectIntact();
    const auto end = Clock::now() + seconds(60);
    while (pages_->counters().waiting != 0 && Clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(pages_->counters().waiting, 0u);
    EXPECT_TRUE(s.Close().ok());
    return opened->held_tokens;
  }
  TierRowCounters counters() const { return pages_->counters(); }
  std::string illness() const { return tier_->Stats().illness; }

 private:
  std::unique_ptr<Store> store_;
  std::unique_ptr<RedisValueTier> tier_;
  std::unique_ptr<TierRow> pages_;
  std::unique_ptr<TierChain> tiers_;
  std::unique_ptr<TestSession> session_;
};

class RemoteRedisTest : public ::testing::TestWithParam<remote::Seal> {
 protected:
  RedisProcess redis_;
};

TEST_P(RemoteRedisTest, WhatOneComputedTheOtherOpens) {
  Node a(redis_, GetParam(), seconds(60)), b(redis_, GetParam(), seconds(60));
  EXPECT_EQ(a.Serve(), 0u);
  EXPECT_EQ(a.counters().written, 300u);
  EXPECT_EQ(a.counters().failed, 0u);
  EXPECT_EQ(b.Serve(), 4800u);
  EXPECT_EQ(b.counters().read, 300u);
  EXPECT_EQ(b.counters().missed, 0u);
  EXPECT_EQ(b.illness(), "");
}

TEST_P(RemoteRedisTest, WhoHasAnotherSecretFindsNothing) {
  Node a(redis_, GetParam(), seconds(60));
  EXPECT_EQ(a.Serve(), 0u);
  Node other(redis_, GetParam(), seconds(60), "fedcba9876543210fedcba9876543210");
  EXPECT_EQ(other.Serve(), 0u);
  EXPECT_EQ(other.counters().found, 0u);
}

TEST_P(RemoteRedisTest, WithoutItsServerThereAreMissesOnly) {
  Node a(redis_, GetParam(), seconds(60)), b(redis_, GetParam(), milliseconds(200));
  EXPECT_EQ(a.Serve(), 0u);
  redis_.Kill();
  EXPECT_EQ(b.Serve(), 0u);
  EXPECT_EQ(b.counters().read, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seals, RemoteRedisTest,
                         ::testing::Values(remote::Seal::kNone, remote::Seal::kGcm),
                         [](const auto& test) { return std::string(SealName(test.param)); });

}  // namespace
}  // namespace kvstrata::testing
