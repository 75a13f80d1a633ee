// SPDX-License-Identifier: Apache-2.0
// Admin.ProbeRemote and PurgeRemote of real daemons, over a real cluster of three masters.
#include <algorithm>
#include <fstream>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/redis_servers.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16, kPages = 40;
constexpr const char* kChess = "chess{min_tokens = 0}";
constexpr int kPatienceMs = 60'000;
constexpr uint64_t kTimeoutUs = 30'000'000;  // that no server here needs

RedisServersOptions ThreeMasters() {
  RedisServersOptions options;
  options.masters = 3;
  options.cluster = true;
  return options;
}

class RemoteCallsTest : public ::testing::Test {
 protected:
  RemoteCallsTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }
  std::string secret() const { return folder_ / "secret"; }

  std::unique_ptr<DaemonProcess> Node() const {
    std::vector<std::string> flags;
    for (const std::string& setting :
         {"remote.redis=" + servers_.address(0), "remote.secret_file=" + secret(),
          std::string("remote.write=all"), std::string("remote.deadline=60s"),
          std::string("remote.deadline_most=60s")}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    return std::make_unique<DaemonProcess>(flags);
  }
  // Opens, computes what is not held, and waits until all is written; how much was held.
  uint32_t Serve(const DaemonProcess& node, const char* plan, int32_t seed) {
    Engine engine(Linked(), node.socket());
    model_ = engine.handle();
    const std::vector<int32_t> ids = Prompt(pages_ * kPage + 5, seed);
    uint32_t held = 0;
    const kvs_sequence s = engine.Open(plan, ids, &held);
    EXPECT_NE(s, 0u) << engine.error();
    engine.Run(s, {ids.begin() + held, ids.end()}, held);
    EXPECT_EQ(Linked().kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    EXPECT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    Operator admin(node.socket());
    EXPECT_TRUE(Eventually([&] { return admin.Status().remotes(0).waiting() == 0; }, kPatienceMs));
    return held;
  }
  v1::RemotePrompt PromptOf(const char* plan, int32_t seed) const {
    v1::RemotePrompt prompt;
    prompt.set_model(model_);
    prompt.set_plan(plan);
    const std::vector<int32_t> ids = Prompt(pages_ * kPage + 5, seed);
    prompt.mutable_tokens()->Add(ids.begin(), ids.end());
    return prompt;
  }
  v1::ProbeRemoteResponse Probe(const DaemonProcess& node, const char* plan, int32_t seed) const {
    v1::ProbeRemoteRequest request;
    *request.mutable_prompt() = PromptOf(plan, seed);
    request.set_timeout_us(kTimeoutUs);
    v1::ProbeRemoteResponse response;
    const auto asked =
        Operator(node.socket()).Ask(&v1::Admin::Stub::ProbeRemote, request, &response);
    EXPECT_TRUE(asked.ok()) << asked.ToString();
    return response;
  }
  v1::PurgeRemoteResponse Purge(const DaemonProcess& node, const char* plan, int32_t seed) const {
    v1::PurgeRemoteRequest request;
    *request.mutable_prompt() = PromptOf(plan, seed);
    request.set_timeout_us(kTimeoutUs);
    v1::PurgeRemoteResponse response;
    const auto asked =
        Operator(node.socket()).Ask(&v1::Admin::Stub::PurgeRemote, request, &response);
    EXPECT_TRUE(asked.ok()) << asked.ToString();
    return response;
  }
  // The number of the server at an address.
  size_t Numbered(const std::string& address) const {
    const std::vector<std::string> all = servers_.addresses();
    return static_cast<size_t>(std::ranges::find(all, address) - all.begin());
  }
  uint64_t Stored() const {
    uint64_t names = 0;
    for (size_t i = 0; i < servers_.count(); ++i) {
      names += static_cast<uint64_t>(servers_.Ask(i, {"DBSIZE"}).integer);
    }
    return names;
  }

  const ScratchDir folder_;
  RedisServers servers_{ThreeMasters()};
  uint64_t model_ = 0;
  uint32_t pages_ = kPages;  // pages of a prompt
};

TEST_F(RemoteCallsTest, AProbeTellsOfEveryServerAndWhatItHolds) {
  const auto node = Node();
  EXPECT_EQ(Serve(*node, "full", 1), 0u);
  v1::ProbeRemoteResponse probe = Probe(*node, "", 1);
  ASSERT_EQ(probe.servers_size(), 3);
  EXPECT_EQ(probe.values(), kPages);
  EXPECT_EQ(probe.held(), kPages);
  EXPECT_EQ(probe.held_tokens(), kPages * kPage);
  std::string holder;  // all pages of a group lie in one slot
  for (const v1::RemoteServer& server : probe.servers()) {
    EXPECT_EQ(server.role(), "master");
    EXPECT_EQ(server.reason(), "") << server.why();
    EXPECT_GT(server.round_trip_us(), 0u);
    EXPECT_EQ(server.held(), server.values());
    if (server.held() != 0) holder = server.address();
  }
  EXPECT_EQ(Probe(*node, "", 2).held(), 0u) << "of a prompt that nobody computed";
  servers_.Kill(Numbered(holder));
  probe = Probe(*node, "", 1);
  ASSERT_EQ(probe.servers_size(), 3);
  EXPECT_EQ(probe.held(), 0u);
  for (const v1::RemoteServer& server : probe.servers()) {
    EXPECT_EQ(server.reason().empty(), server.address() != holder) << server.address();
    EXPECT_EQ(server.round_trip_us() != 0, server.address() != holder) << server.address();
  }
}

TEST_F(RemoteCallsTest, AServerThatIsSilentIsTold) {
  const auto node = Node();
  EXPECT_EQ(Serve(*node, "full", 1), 0u);
  servers_.Stop(2);
  v1::ProbeRemoteRequest request;
  request.set_timeout_us(kTimeoutUs);
  v1::ProbeRemoteResponse probe;
  ASSERT_TRUE(Operator(node->socket()).Ask(&v1::Admin::Stub::ProbeRemote, request, &probe).ok());
  ASSERT_EQ(probe.servers_size(), 3);
  for (const v1::RemoteServer& server : probe.servers()) {
    EXPECT_EQ(server.reason().empty(), server.address() != servers_.address(2)) << server.why();
  }
  EXPECT_EQ(probe.values(), 0u);
  servers_.Continue(2);
}

TEST_F(RemoteCallsTest, NoServerIsWaitedForBeyondTheTimeout) {
  const auto node = Node();
  EXPECT_EQ(Serve(*node, "full", 1), 0u);
  v1::ProbeRemoteRequest request;
  request.set_timeout_us(1);  // over before any server can answer
  v1::ProbeRemoteResponse probe;
  ASSERT_TRUE(Operator(node->socket()).Ask(&v1::Admin::Stub::ProbeRemote, request, &probe).ok());
  ASSERT_EQ(probe.servers_size(), 3);
  for (const v1::RemoteServer& server : probe.servers()) EXPECT_NE(server.reason(), "");
}

TEST_F(RemoteCallsTest, WhatIsPurgedNoNodeFinds) {
  pages_ = 160;  // longer than what is attended in full, which has no index
  const auto a = Node(), b = Node();
  EXPECT_EQ(Serve(*a, kChess, 1), 0u);
  EXPECT_TRUE(Eventually([&] { return Stored() > pages_; }, kPatienceMs)) << "an index block, too";
  const uint64_t one = Stored();
  EXPECT_EQ(Serve(*a, kChess, 2), 0u);
  const v1::PurgeRemoteResponse purge = Purge(*a, kChess, 1);
  EXPECT_EQ(purge.held(), one);
  EXPECT_EQ(purge.failed(), 0u) << purge.why();
  EXPECT_EQ(Stored(), one) << "the other prompt stays";
  EXPECT_EQ(Probe(*a, kChess, 1).held(), 0u);
  EXPECT_EQ(Serve(*b, kChess, 2), pages_ * kPage);
  EXPECT_EQ(Serve(*b, kChess, 1), 0u);
}

TEST_F(RemoteCallsTest, APurgeThatAServerDoesNotAnswerHasFailed) {
  const auto node = Node();
  EXPECT_EQ(Serve(*node, "full", 1), 0u);
  for (size_t i = 0; i < servers_.count(); ++i) servers_.Kill(i);
  const v1::PurgeRemoteResponse purge = Purge(*node, "", 1);
  EXPECT_EQ(purge.values(), kPages);
  EXPECT_EQ(purge.failed(), kPages);
  EXPECT_NE(purge.reason(), "");
}

TEST_F(RemoteCallsTest, TheyAreRefusedWithoutARemoteTierOrAWholePage) {
  const DaemonProcess alone;
  v1::ProbeRemoteResponse probed;
  v1::PurgeRemoteResponse purged;
  Operator admin(alone.socket());
  const Status probe = admin.Ask(&v1::Admin::Stub::ProbeRemote, v1::ProbeRemoteRequest(), &probed);
  EXPECT_EQ(probe.reason(), "TIER_UNKNOWN");
  EXPECT_NE(probe.message().find("set remote.redis or remote.mooncake"), std::string::npos);
  EXPECT_EQ(admin.Ask(&v1::Admin::Stub::PurgeRemote, v1::PurgeRemoteRequest(), &purged).reason(),
            "TIER_UNKNOWN");
  const auto node = Node();
  EXPECT_EQ(Serve(*node, "full", 1), 0u);
  v1::PurgeRemoteRequest request;
  *request.mutable_prompt() = PromptOf("", 1);
  request.mutable_prompt()->mutable_tokens()->Truncate(3);
  EXPECT_EQ(Operator(node->socket()).Ask(&v1::Admin::Stub::PurgeRemote, request, &purged).reason(),
            "REMOTE_PROMPT");
}

}  // namespace
}  // namespace kvstrata::testing
