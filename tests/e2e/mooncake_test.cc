// SPDX-License-Identifier: Apache-2.0
// Real daemons that share a Mooncake Store, by way of the agent that is shipped; the store below it
// is one of files. What one computed the other opens; without an agent, and under a store that
// hangs, there are misses only.
#include <poll.h>
#include <sys/syscall.h>

#include <charconv>
#include <fstream>
#include <optional>

#include "base/unique_fd.h"
#include "kvstrata/v1/nodes.grpc.pb.h"
#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/mooncake_folder.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16, kPages = 40;
constexpr uint32_t kPrompt = kPages * kPage + 5, kUsable = kPages * kPage;
constexpr const char* kMaster = "127.0.0.1:50051";
constexpr int kPatienceMs = 120'000;
constexpr uint64_t kTimeoutUs = 60'000'000;  // that no call here needs

using Outputs = std::vector<std::vector<float>>;

// The daemon's children: its agent, if one runs.
std::optional<pid_t> AgentOf(const DaemonProcess& node) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc()) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text;
    std::getline(file, text);
    const size_t end = text.rfind(") ");  // the end of the program's name
    if (end == text.npos || text.size() < end + 5 || text[end + 2] == 'Z') continue;
    if (std::atoi(text.c_str() + end + 4) == node.pid()) return pid;
  }
  return std::nullopt;
}

class MooncakeTest : public ::testing::Test {
 protected:
  MooncakeTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }
  std::string secret() const { return folder_.path() + "/secret"; }

  // A node that waits for its agent. Deadlines are none of a test's business, unless it says so.
  std::unique_ptr<DaemonProcess> Node(const std::string& deadline = "60s",
                                      const std::string& write = "all") const {
    std::vector<std::string> flags;
    for (const std::string& setting :
         {std::string("remote.mooncake=") + kMaster, "remote.secret_file=" + secret(),
          "remote.write=" + write, std::string("remote.miss_ttl=0"), "remote.deadline=" + deadline,
          "remote.deadline_most=" + deadline}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    auto node = std::make_unique<DaemonProcess>(flags);
    EXPECT_TRUE(IsReady(*node));
    return node;
  }
  static bool IsReady(const DaemonProcess& node) {
    Operator admin(node.socket());
    return Eventually(
        [&] {
          const v1::Remote remote = admin.Status().remotes(0);
          return remote.shards(0).connections() == 1 && remote.illness().empty();
        },
        kPatienceMs);
  }
  // Opens a prompt, computes what is not held, and decodes; the outputs of decoded tokens.
  Outputs Serve(const DaemonProcess& node, int32_t seed, uint32_t* held) {
    Engine engine(Linked(), node.socket());
    model_ = engine.handle();
    const std::vector<int32_t> ids = Prompt(kPrompt, seed);
    const kvs_sequence s = engine.Open("full", ids, held);
    EXPECT_NE(s, 0u) << engine.error();
    engine.Run(s, {ids.begin() + *held, ids.end()}, *held);
    EXPECT_EQ(Linked().kvs_prefill_done(engine.session(), s), KVS_OK) << engine.error();
    EXPECT_EQ(Linked().kvs_settle(engine.session(), s), KVS_OK) << engine.error();
    Outputs all;
    for (int32_t i = 0; i < 4; ++i) {
      for (auto& out : engine.Run(s, {500 + i}, kPrompt + static_cast<uint32_t>(i))) {
        all.push_back(std::move(out));
      }
    }
    EXPECT_EQ(engine.code(), KVS_OK) << engine.error();
    return all;
  }
  // And waits until all is written.
  Outputs Compute(const DaemonProcess& node, int32_t seed) {
    uint32_t held = 1;
    const Outputs outputs = Serve(node, seed, &held);
    EXPECT_EQ(held, 0u);
    Operator admin(node.socket());
    EXPECT_TRUE(Eventually([&] { return admin.Status().remotes(0).waiting() == 0; }, kPatienceMs));
    EXPECT_EQ(admin.Status().remotes(0).failed(), 0u);
    return outputs;
  }
  v1::RemotePrompt PromptOf(int32_t seed) const {
    v1::RemotePrompt prompt;
    prompt.set_model(model_);
    const std::vector<int32_t> ids = Prompt(kPrompt, seed);
    prompt.mutable_tokens()->Add(ids.begin(), ids.end());
    return prompt;
  }
  v1::ProbeRemoteResponse Probe(const DaemonProcess& node, int32_t seed) const {
    v1::ProbeRemoteRequest request;
    *request.mutable_prompt() = PromptOf(seed);
    request.set_timeout_us(kTimeoutUs);
    v1::ProbeRemoteResponse response;
    const auto asked =
        Operator(node.socket()).Ask(&v1::Admin::Stub::ProbeRemote, request, &response);
    EXPECT_TRUE(asked.ok()) << asked.ToString();
    return response;
  }

  // A metric of its server; at most a second old. -1: there is none.
  static double MetricOf(const DaemonProcess& node, const std::string& name) {
    v1::GetMetricsResponse page;
    EXPECT_TRUE(Operator(node.socket())
                    .Ask(&v1::Admin::Stub::GetMetrics, v1::GetMetricsRequest(), &page)
                    .ok());
    const std::string series = "\n" + name + "{server=\"" + kMaster + "\"} ";
    const size_t at = page.text().find(series);
    return at == std::string::npos ? -1 : std::atof(page.text().c_str() + at + series.size());
  }

  const ScratchDir folder_;
  MooncakeFolder store_;
  uint64_t model_ = 0;
};

TEST_F(MooncakeTest, WhatOneComputedTheOtherOpens) {
  const auto a = Node(), b = Node();
  const Outputs want = Compute(*a, 1);
  EXPECT_EQ(Operator(a->socket()).Status().remotes(0).written(), kPages);
  EXPECT_EQ(store_.count(), 2 * kPages) << "a stripe and a head each";
  uint32_t held = 0;
  EXPECT_EQ(Serve(*b, 1, &held), want);
  EXPECT_EQ(held, kUsable);
  Operator admin(b->socket());
  const v1::Remote remote = admin.Status().remotes(0);
  EXPECT_EQ(remote.engine(), "mooncake");
  EXPECT_EQ(remote.servers(), kMaster);
  EXPECT_EQ(remote.read(), kPages);
  EXPECT_EQ(remote.missed(), 0u);
  ASSERT_EQ(remote.shards_size(), 1);
  const v1::RemoteShard& shard = remote.shards(0);
  EXPECT_EQ(shard.address(), kMaster);
  EXPECT_FALSE(shard.breaker_open()) << shard.last_error();
  EXPECT_GE(shard.probes().hits(), kPages);
  EXPECT_GE(shard.reads().hits(), 2 * kPages) << "heads are among them";
  EXPECT_GT(shard.received_bytes(), 0u);
  EXPECT_EQ(shard.timeouts() + shard.failures() + shard.hedges(), 0u);
  EXPECT_TRUE(Eventually([&] { return MetricOf(*b, "kvstrata_remote_agent_peak_bytes") > 0; },
                         kPatienceMs));
  EXPECT_TRUE(
      Eventually([&] { return MetricOf(*b, "kvstrata_remote_agent_bytes") == 0; }, kPatienceMs));
  EXPECT_EQ(admin.Audit(), "");
}

TEST_F(MooncakeTest, AKilledAgentCostsMissesOnlyAndComesBack) {
  const auto a = Node(), b = Node();
  const Outputs want = Compute(*a, 1), other = Compute(*a, 2);
  const std::optional<pid_t> before = AgentOf(*b);
  ASSERT_TRUE(before);
  store_.Refuse();  // so that no agent is back before the open
  ASSERT_EQ(kill(*before, SIGKILL), 0);
  Operator admin(b->socket());
  EXPECT_TRUE(
      Eventually([&] { return !admin.Status().remotes(0).illness().empty(); }, kPatienceMs));
  EXPECT_TRUE(
      Eventually([&] { return admin.Status().health().starts_with("degraded"); }, kPatienceMs));
  uint32_t held = 1;
  EXPECT_EQ(Serve(*b, 1, &held), want);
  EXPECT_EQ(held, 0u);
  EXPECT_EQ(admin.Audit(), "");
  store_.Admit();
  ASSERT_TRUE(IsReady(*b));
  EXPECT_NE(AgentOf(*b), before);
  EXPECT_EQ(Serve(*b, 2, &held), other);
  EXPECT_EQ(held, kUsable);
  EXPECT_TRUE(Eventually([&] { return admin.Status().health() == "serving"; }, kPatienceMs));
}

TEST_F(MooncakeTest, AStoreThatHangsDelaysAnOpenByItsDeadline) {
  const auto a = Node(), b = Node("100ms", "off");
  const Outputs want = Compute(*a, 1);
  store_.Hold();
  uint32_t held = 1;
  EXPECT_EQ(Serve(*b, 1, &held), want);
  EXPECT_EQ(held, 0u);
  Operator admin(b->socket());
  EXPECT_EQ(admin.Status().remotes(0).late_searches(), 1u);
  // A deadline that was over before the agent could be asked is no lateness of the agent's.
  int32_t seed = 100;
  EXPECT_TRUE(Eventually(
      [&] {
        Serve(*b, ++seed, &held);
        EXPECT_EQ(held, 0u);
        return admin.Status().remotes(0).shards(0).timeouts() != 0;
      },
      kPatienceMs));
  EXPECT_GT(admin.Status().remotes(0).shards(0).probes().late(), 0u);
  EXPECT_EQ(admin.Audit(), "");
  store_.Release();
  EXPECT_EQ(Probe(*b, 1).held(), kPages) << "the same agent answers again";
}

TEST_F(MooncakeTest, AnAgentEndsWithADaemonThatIsKilledThoughTheStoreHangs) {
  const auto a = Node("100ms");
  const std::optional<pid_t> agent = AgentOf(*a);
  ASSERT_TRUE(agent);
  const UniqueFd end(static_cast<int>(syscall(SYS_pidfd_open, *agent, 0)));
  ASSERT_TRUE(end);
  store_.Hold();
  uint32_t held = 1;
  Serve(*a, 1, &held);
  a->Stop(SIGKILL);
  pollfd wait{end.get(), POLLIN, 0};
  EXPECT_EQ(poll(&wait, 1, kPatienceMs), 1);
}

TEST_F(MooncakeTest, AProbeAndAPurgeAskTheStore) {
  const auto a = Node(), b = Node();
  Compute(*a, 1);
  const uint64_t one = store_.count();
  Compute(*a, 2);
  const v1::ProbeRemoteResponse probe = Probe(*a, 1);
  ASSERT_EQ(probe.servers_size(), 1);
  EXPECT_EQ(probe.servers(0).address(), kMaster);
  EXPECT_EQ(probe.servers(0).reason(), "") << probe.servers(0).why();
  EXPECT_GT(probe.servers(0).round_trip_us(), 0u);
  EXPECT_EQ(probe.servers(0).held(), kPages);
  EXPECT_EQ(probe.held_tokens(), kUsable);
  v1::PurgeRemoteRequest request;
  *request.mutable_prompt() = PromptOf(1);
  request.set_timeout_us(kTimeoutUs);
  v1::PurgeRemoteResponse purge;
  ASSERT_TRUE(Operator(a->socket()).Ask(&v1::Admin::Stub::PurgeRemote, request, &purge).ok());
  EXPECT_EQ(purge.held(), kPages);
  EXPECT_EQ(purge.failed(), 0u) << purge.why();
  EXPECT_EQ(store_.count(), one) << "the other prompt stays";
  const Engine model(Linked(), b->socket());  // b knows it from now on
  EXPECT_EQ(model.handle(), model_);
  EXPECT_EQ(Probe(*b, 1).held(), 0u);
  EXPECT_EQ(Probe(*b, 2).held(), kPages);
}

TEST_F(MooncakeTest, WhatItHasNotIsRefusedWithTheNextStep) {
  const auto a = Node();
  const auto stub = v1::Cluster::NewStub(
      grpc::CreateChannel("unix:" + a->socket(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  v1::LookupClusterResponse response;
  const kvstrata::Status asked =
      FromGrpc(stub->LookupCluster(&context, v1::LookupClusterRequest(), &response));
  EXPECT_EQ(asked.code(), Code::kUnimplemented);
  EXPECT_EQ(asked.reason(), "MOONCAKE_NODES");
  v1::GetMetricsResponse page;
  ASSERT_TRUE(
      Operator(a->socket()).Ask(&v1::Admin::Stub::GetMetrics, v1::GetMetricsRequest(), &page).ok());
  for (const std::string name :
       {"kvstrata_remote_requests_total", "kvstrata_remote_breaker_open",
        "kvstrata_remote_agent_bytes", "kvstrata_remote_agent_peak_bytes"}) {
    EXPECT_NE(page.text().find(name + "{server=\"" + kMaster + "\"}"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace kvstrata::testing
