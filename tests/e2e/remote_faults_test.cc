// SPDX-License-Identifier: Apache-2.0
// Real daemons around a real cluster whose master is killed, and what somebody finds who has a copy
// of the servers' memory. bench/remote_faults.py has more of these, at size.
#include <fstream>
#include <set>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/server/tier/redis_servers.h"

namespace kvstrata::testing {
namespace {

constexpr const char* kPlan = "full";
constexpr uint32_t kPages = 20;  // at least remote.min_tokens
constexpr int kPrompts = 12;
constexpr int kPatienceMs = 60'000;

std::vector<int32_t> PromptOf(int i) {
  return Prompt(kPages * static_cast<uint32_t>(ToyModel().page) + 1, 300 + i);
}

class RemoteFaultsTest : public ::testing::Test {
 protected:
  RemoteFaultsTest() {
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }

  std::string secret() const { return folder_.path() + "/secret"; }
  // A node with a disk of its own. Deadlines are none of a test's business.
  std::unique_ptr<DaemonProcess> Start(const std::string& node, const RedisServers& servers,
                                       const std::string& seal = "none") const {
    std::string addresses;
    for (const std::string& address : servers.addresses()) {
      addresses += (addresses.empty() ? "" : ",") + address;
    }
    std::vector<std::string> flags;
    for (const std::string& setting :
         {"disk.path=" + folder_.path() + "/" + node, std::string("disk.budget_bytes=32MiB"),
          std::string("disk.segment_bytes=4MiB"), "remote.redis=" + addresses,
          "remote.secret_file=" + secret(), std::string("remote.write=all"), "remote.seal=" + seal,
          std::string("remote.deadline=60s"), std::string("remote.deadline_most=60s")}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    return std::make_unique<DaemonProcess>(flags);
  }
  // Opens the prompt, computes what is not held, and decodes a token; how much was held.
  static uint32_t Serve(Engine* engine, int i) {
    std::vector<int32_t> ids = PromptOf(i);
    uint32_t held = 0;
    const kvs_sequence s = engine->Open(kPlan, ids, &held);
    EXPECT_NE(s, 0u) << engine->error();
    engine->Run(s, {ids.begin() + held, ids.end()}, held);
    EXPECT_EQ(engine->code(), KVS_OK) << engine->error();
    EXPECT_TRUE(engine->DecodesRight(s, &ids, 7));
    EXPECT_EQ(Linked().kvs_settle(engine->session(), s), KVS_OK) << engine->error();
    EXPECT_EQ(Linked().kvs_sequence_close(engine->session(), s), KVS_OK) << engine->error();
    return held;
  }
  // Prompts of `n` are in the servers, and in their replicas.
  void Compute(const RedisServers& servers, int n, const std::string& seal = "none") const {
    const auto a = Start("a-" + seal, servers, seal);
    Engine engine(Linked(), a->socket());
    for (int i = 0; i < n; ++i) EXPECT_EQ(Serve(&engine, i), 0u);
    Operator admin(a->socket());
    EXPECT_TRUE(Eventually([&] { return admin.Status().remotes(0).waiting() == 0; }, kPatienceMs));
    EXPECT_EQ(admin.Status().remotes(0).written(), static_cast<uint64_t>(n) * kPages);
    for (size_t i = 0; servers.count() > servers.masters() && i < servers.masters(); ++i) {
      servers.Ask(i, {"WAIT", "1", "60000"});
    }
  }

  const ScratchDir folder_;
};

TEST_F(RemoteFaultsTest, AMasterThatIsKilledCostsNoTokenAndNoError) {
  RedisServers servers({.masters = 3, .replicas = 1, .cluster = true});
  Compute(servers, kPrompts);
  const auto b = Start("b", servers);
  Engine engine(Linked(), b->socket());
  servers.Kill(1);
  for (int i = 0; i < kPrompts; ++i) EXPECT_EQ(Serve(&engine, i), kPages * ToyModel().page) << i;
  EXPECT_EQ(Operator(b->socket()).Audit(), "");
}

// Runs of the prompt's ids, and parts of the rows that the engine appended for it.
std::vector<std::string> SecretsOf(const ToyModel& model) {
  const std::vector<int32_t> ids = PromptOf(0);
  const auto text = [](const auto* values, size_t n) {
    return std::string(reinterpret_cast<const char*>(values), n * sizeof(*values));
  };
  std::vector<std::string> all;
  for (size_t i = 0; i + 4 < ids.size(); i += 16) all.push_back(text(ids.data() + i, 4));
  for (const ToyModel::Kind kind : {ToyModel::kKey, ToyModel::kValue}) {
    const std::vector<float> rows = model.Rows(kind, 0, ids, 0);
    const size_t row = static_cast<size_t>(model.kv_heads) * static_cast<size_t>(model.dim);
    for (size_t i = 0; i < ids.size() - 1; i += 16) all.push_back(text(&rows[i * row], 4));
  }
  return all;
}

TEST_F(RemoteFaultsTest, NothingOfAPromptIsInADumpOfServersThatHoldItSealed) {
  const std::vector<std::string> secrets = SecretsOf(ToyModel());
  for (const std::string seal : {"none", "gcm"}) {
    const RedisServers servers;
    Compute(servers, 1, seal);
    const std::string dump = servers.Dump(0);
    ASSERT_NE(dump.find("kv1:{"), std::string::npos);
    const auto found = std::ranges::count_if(
        secrets, [&](const auto& one) { return dump.find(one) != std::string::npos; });
    // Unsealed it has the rows, which shows that they are looked for rightly; ids it never has.
    EXPECT_EQ(found, seal == "none" ? 2 * kPages : 0) << seal;
  }
}

}  // namespace
}  // namespace kvstrata::testing
