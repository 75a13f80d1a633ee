// SPDX-License-Identifier: Apache-2.0
// Real daemons that share a real redis-server, each with users of its own: those that stand for one
// tenant of the cluster open what the other computed, with the same bits; nobody else finds it.
#include <fstream>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/redis_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr uint32_t kPage = 16;
constexpr uint32_t kPrompt = 40 * kPage + 5;
constexpr int kPatienceMs = 60'000;

// Serves the prompt as that user; says 'h' (all of it was held), '-' (nothing) or 'p' (a part), and
// exits with 0 if what it decodes is right.
int ServeAs(const std::string& socket, int uid) {
  const Abi& abi = Linked();  // while we may read it
  const auto user = static_cast<uid_t>(uid);
  if (user != geteuid() && (setresgid(user, user, user) != 0 || setresuid(user, user, user) != 0)) {
    return 4;
  }
  Engine engine(abi, socket);
  std::vector<int32_t> ids = Prompt(kPrompt, 11);
  uint32_t held = 0;
  const kvs_sequence s = engine.Open("full", ids, &held);
  engine.Run(s, {ids.begin() + held, ids.end()}, held);
  if (s == 0 || abi.kvs_prefill_done(engine.session(), s) != KVS_OK) {
    std::fprintf(stderr, "%s\n", engine.error().c_str());
    return 1;
  }
  const ::testing::AssertionResult right = engine.DecodesRight(s, &ids, 500);
  if (!right) std::fprintf(stderr, "%s\n", right.message());
  Say(held == 40 * kPage ? 'h' : (held == 0 ? '-' : 'p'));
  return right ? 0 : 2;
}

const bool kRole = RegisterRole("serve_as", ServeAs);

class TenantsTest : public ::testing::Test {
 protected:
  TenantsTest() {
    EXPECT_TRUE(kRole);
    std::ofstream(secret()) << "0123456789abcdef0123456789abcdef\n";
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }

  std::string secret() const { return folder_ / "secret"; }
  // A node where these users stand for these tenants; others may connect.
  std::unique_ptr<DaemonProcess> Node(const std::vector<std::pair<uid_t, std::string>>& map) const {
    std::vector<std::string> flags;
    const auto set = [&flags](const std::string& s) { flags.insert(flags.end(), {"--set", s}); };
    set("pool.device_bytes=64MiB");
    set("pool.host_bytes=64MiB");
    set("remote.redis=" + redis_.address());
    set("remote.secret_file=" + secret());
    set("remote.write=all");
    set("remote.deadline=60s");
    set("remote.deadline_most=60s");
    for (const auto& [uid, tenant] : map) {
      set("remote.tenants.uid:" + std::to_string(uid) + ".name=" + tenant);
    }
    auto node = std::make_unique<DaemonProcess>(flags);
    using std::filesystem::permissions, std::filesystem::perms;
    permissions(std::filesystem::path(node->socket()).parent_path(), perms(0755));
    permissions(node->socket(), perms(0666));
    permissions(node->socket() + ".attach", perms(0666));
    return node;
  }
  // Has the user serve the prompt, of which he must have so much; until what he computed is
  // written.
  static void Serve(const DaemonProcess& node, uid_t uid, char held) {
    SCOPED_TRACE("uid " + std::to_string(uid));
    ClientProcess client("serve_as", node.socket(), static_cast<int>(uid));
    EXPECT_TRUE(client.Says(held));
    EXPECT_EQ(client.Wait(), 0);
    Operator admin(node.socket());
    EXPECT_TRUE(Eventually([&] { return admin.Status().remotes(0).waiting() == 0; }, kPatienceMs));
    EXPECT_EQ(admin.Status().remotes(0).failed(), 0u);
    EXPECT_EQ(admin.Audit(), "");
  }

  const ScratchDir folder_;
  const RedisProcess redis_;
};

TEST_F(TenantsTest, NodesShareByTheTenantsName) {
  const uid_t user = geteuid();
  const auto a = Node({{user, "search"}}), b = Node({{user, "search"}});
  const auto other = Node({{user, "ads"}}), unmapped = Node({});
  Serve(*a, user, '-');
  Serve(*other, user, '-');
  Serve(*unmapped, user, '-');
  Serve(*b, user, 'h');
}

TEST_F(TenantsTest, UsersOfOneTenantShareWhateverTheirNumbers) {
  if (geteuid() != 0) GTEST_SKIP() << "starts processes of other users, which root alone may";
  constexpr uid_t kHere = 12345, kThere = 23456, kOther = 34567;
  const auto a = Node({{kHere, "search"}});
  const auto b = Node({{kThere, "search"}, {kOther, "ads"}});
  Serve(*a, kHere, '-');
  Serve(*b, kHere, '-');  // the same number, which stands for nobody there
  Serve(*b, kOther, '-');
  Serve(*b, kThere, 'h');
  Serve(*a, kThere, '-');
  Serve(*a, kHere, 'h');
}

}  // namespace
}  // namespace kvstrata::testing
