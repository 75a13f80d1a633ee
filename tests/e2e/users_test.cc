// SPDX-License-Identifier: Apache-2.0
// Several users on one daemon: a hostile one takes what it can get, and neither its neighbour nor
// the operator notices. Each is a process of its own under its own user, which needs root.
//
// A flood is a role that says 'f' when it was refused for the first time, which is when it is at
// its limit, and goes on until it is killed.
#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/remote_client.h"

namespace kvstrata::testing {
namespace {

constexpr uid_t kHostile = 12345, kVictim = 23456;

// Ends with the test, however that ends.
void Become(uid_t uid) {
  if (setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0) _exit(4);
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) _exit(4);  // setresuid has cleared it
}

UniqueFd Dial(const std::string& path, int type) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return {};
  }
  return fd;
}

// As the library and the CLI dial: gRPC's own connect(2) does not wait while the backlog is full.
std::shared_ptr<grpc::Channel> ChannelTo(const std::string& socket) {
  UniqueFd fd = Dial(socket, SOCK_STREAM);
  if (!fd) return nullptr;
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
  return grpc::CreateInsecureChannelFromFd("kvstrata", fd.release());
}

// Whether the daemon lets go of it within ms.
bool IsEnded(const UniqueFd& fd, int ms) {
  pollfd hangup{fd.get(), POLLRDHUP, 0};
  return poll(&hangup, 1, ms) == 1;
}

// Holds what it gets and never stops asking for more. Only an ended one is given up.
int Flood(const std::string& path, int type) {
  Become(kHostile);
  constexpr size_t kMost = 400;
  std::vector<UniqueFd> held;
  for (bool told = false;;) {
    UniqueFd fd = Dial(path, type);
    if (fd) held.push_back(std::move(fd));
    if (held.size() < kMost) continue;
    const size_t ended = std::erase_if(held, [](const UniqueFd& h) { return IsEnded(h, 0); });
    if (ended == 0 || told) continue;
    Say('f');
    told = true;
  }
}
int FloodConnections(const std::string& socket, int) { return Flood(socket, SOCK_STREAM); }
int FloodHandshakes(const std::string& socket, int) {
  return Flood(socket + ".attach", SOCK_SEQPACKET);
}

// Asks for more by `more`, which is false when it was refused, again and again.
int FloodBy(const std::function<bool()>& more) {
  for (bool told = false;;) {
    if (more() || told) continue;
    Say('f');
    told = true;
  }
}

int FloodSessions(const std::string& socket, int) {
  const Abi& abi = Linked();  // while we may read it
  Become(kHostile);
  std::vector<std::unique_ptr<Engine>> held;
  return FloodBy([&] {
    held.push_back(std::make_unique<Engine>(abi, socket));
    const bool attached = held.back()->code() == KVS_OK;
    if (!attached) held.pop_back();
    return attached;
  });
}

int FloodModels(const std::string& socket, int) {
  const Abi& abi = Linked();
  Become(kHostile);
  const Engine engine(abi, socket);
  return FloodBy([&, n = 0]() mutable {
    const ToyModel model{.digest = "hostile " + std::to_string(n++)};
    const kvs_model_desc desc = model.Desc();
    kvs_model handle = 0;
    return abi.kvs_model_register(engine.session(), &desc, &handle) == KVS_OK;
  });
}

int FloodPools(const std::string& socket, int) {
  const Abi& abi = Linked();
  Become(kHostile);
  Engine engine(abi, socket);
  return FloodBy([&, n = 0]() mutable {  // the last bit too
    return engine.Prefill("full", Prompt(2000, n++)) != 0 ||
           engine.Prefill("full", Prompt(16, n++)) != 0;
  });
}

// A neighbour that wants little: a session on either transport, a sequence, an end; `rounds` times.
int Victim(const std::string& socket, int rounds) {
  const Abi& abi = Linked();  // while we may read it
  Become(kVictim);
  const auto failed = [](const char* what, const std::string& why) {
    std::fprintf(stderr, "%s: %s\n", what, why.c_str());
    return 1;
  };
  for (int i = 0; i < rounds; ++i) {
    RemoteClient remote(ChannelTo(socket));
    if (!remote.failure().ok()) return failed("remote session", remote.failure().ToString());
    Engine engine(abi, socket);
    if (engine.code() != KVS_OK) return failed("linked session", engine.error());
    const kvs_sequence sequence = engine.Prefill("full", Prompt(40, i));
    if (sequence == 0) return failed("sequence", engine.error());
    if (abi.kvs_sequence_close(engine.session(), sequence) != KVS_OK) {
      return failed("close", engine.error());
    }
  }
  return 0;
}

// What the hostile user hears when it calls once more; its reason's first letter.
int Hears(const std::string& socket, int) {
  Become(kHostile);
  const RemoteClient remote(ChannelTo(socket));
  Say(remote.failure().reason().empty() ? '-' : remote.failure().reason()[0]);
  return 0;
}

const bool kRoles = RegisterRole("flood_connections", FloodConnections) &&
                    RegisterRole("flood_handshakes", FloodHandshakes) &&
                    RegisterRole("flood_sessions", FloodSessions) &&
                    RegisterRole("flood_models", FloodModels) &&
                    RegisterRole("flood_pools", FloodPools) && RegisterRole("victim", Victim) &&
                    RegisterRole("hears", Hears);

class UsersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(kRoles);
    if (geteuid() != 0) GTEST_SKIP() << "starts processes of other users, which root alone may";
  }
  void Serve(const std::vector<std::string>& settings) {
    std::vector<std::string> flags = {"--set", "pool.device_bytes=64MiB", "--set",
                                      "pool.host_bytes=64MiB"};
    for (const std::string& setting : settings) flags.insert(flags.end(), {"--set", setting});
    daemon_ = std::make_unique<DaemonProcess>(flags);
    using std::filesystem::permissions, std::filesystem::perms;
    permissions(std::filesystem::path(socket()).parent_path(), perms(0755));
    permissions(socket(), perms(0666));
    permissions(socket() + ".attach", perms(0666));
  }
  std::string socket() const { return daemon_->socket(); }

  // The operator's own program, as he runs it.
  int Cli(const std::string& words) const {
    const auto program =
        std::filesystem::read_symlink("/proc/self/exe").replace_filename("kvstrata");
    const std::string line =
        program.string() + " --timeout 60s --socket " + socket() + " " + words + " >/dev/null";
    return std::system(line.c_str());
  }
  void NobodyElseNotices(const char* flood) {
    ClientProcess hostile(flood, socket());
    ASSERT_TRUE(hostile.Says('f')) << "the flood is never refused";
    ClientProcess victim("victim", socket(), 20);
    EXPECT_EQ(Cli("status"), 0);
    EXPECT_EQ(Cli("quota ls"), 0);
    EXPECT_EQ(victim.Wait(), 0) << "refused within its share";
    EXPECT_EQ(Cli("session ls"), 0);
  }

  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(UsersTest, AFloodOfConnectionsIsTheFloodersOwn) {
  Serve({"limits.connections=50"});
  NobodyElseNotices("flood_connections");
}

TEST_F(UsersTest, AFloodOfHandshakesIsTheFloodersOwn) {
  Serve({});
  NobodyElseNotices("flood_handshakes");
}

TEST_F(UsersTest, AFloodOfSessionsIsTheFloodersOwn) {
  Serve({"limits.sessions=20", "session.max=64"});
  NobodyElseNotices("flood_sessions");
}

TEST_F(UsersTest, AFloodOfModelsIsTheFloodersOwn) {
  Serve({});
  NobodyElseNotices("flood_models");
}

TEST_F(UsersTest, WhoTakesBothPoolsLeavesTheOthersShare) {
  Serve({"pool.arena_bytes=1MiB"});
  NobodyElseNotices("flood_pools");
}

TEST_F(UsersTest, TheOperatorSeesWhoWasRefusedAndMayLetHimIn) {
  Serve({"limits.connections=50"});
  const auto root = v1::Admin::NewStub(ChannelTo(socket()));
  const auto refused = [&root] {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::GetStatusResponse status;
    EXPECT_TRUE(root->GetStatus(&context, v1::GetStatusRequest(), &status).ok());
    for (const v1::UserQuota& user : status.users()) {
      if (user.user() == "uid:12345") return user.refused();
    }
    return uint64_t{0};
  };
  ClientProcess hostile("flood_connections", socket());
  ASSERT_TRUE(hostile.Says('f'));
  EXPECT_TRUE(Eventually([&] { return refused() > 0; }));
  hostile.Kill();
  EXPECT_EQ(Cli("quota set uid:12345 connections 1000"), 0);
  ClientProcess again("hears", socket());
  EXPECT_TRUE(again.Says('-')) << "it has room now";
}

TEST_F(UsersTest, RootGetsInWhenAnotherUserHasTheDescriptors) {
  Serve({"limits.connections=0"});
  rlimit few{200, 200};
  ASSERT_EQ(prlimit(daemon_->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  ClientProcess hostile("flood_connections", socket());
  ASSERT_TRUE(hostile.Says('f'));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Cli("status"), 0);
  ClientProcess hears("hears", socket());
  EXPECT_TRUE(hears.Says('D')) << "DESCRIPTORS";
  EXPECT_EQ(Cli("session ls"), 0);
}

}  // namespace
}  // namespace kvstrata::testing
