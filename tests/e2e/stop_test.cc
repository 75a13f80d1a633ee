// SPDX-License-Identifier: Apache-2.0
// SIGTERM at random moments beside clients of both transports that work, hang, or do not read: the
// daemon always ends with 0, its checkpoint written, its sockets gone; and clients hear of it soon.
//   KVS_STOP_CYCLES=200 stop_e2e_test
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

using Clock = std::chrono::steady_clock;

int Cycles() {
  const char* given = std::getenv("KVS_STOP_CYCLES");
  return given == nullptr ? 12 : std::max(std::atoi(given), 1);
}

// --- clients -------------------------------------------------------------------------------------

// Prompts and decode steps until a call fails; then detaches and ends. Says 'r' when the first
// prompt is there.
int Work(const Abi& abi, const std::string& socket, int seed) {
  Engine engine(abi, socket);
  for (int i = 0; engine.code() == KVS_OK; ++i) {
    std::vector<int32_t> ids = Prompt(200, seed + i);
    const kvs_sequence s = engine.Prefill("full", ids);
    if (i == 0) Say(s == 0 ? 'x' : 'r');
    for (int t = 0; t < 4 && engine.code() == KVS_OK; ++t) {
      engine.Run(s, {t}, static_cast<uint32_t>(ids.size()) + t);
    }
  }
  return 0;
}
const bool kLinked = RegisterRole(
    "linked", [](const std::string& socket, int seed) { return Work(Linked(), socket, seed); });
const bool kRemote = RegisterRole(
    "remote", [](const std::string& socket, int seed) { return Work(Remote(), socket, seed); });

// Attaches, and detaches when it is told to by the end of its sleep.
const bool kDetaching = RegisterRole("detaching", [](const std::string& socket, int delay_us) {
  Engine engine(Remote(), socket);
  Say(engine.code() == KVS_OK ? 'r' : 'x');
  std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return 0;
});

// Attaches, stops itself, and detaches when it is continued.
const bool kStopping = RegisterRole("stopping", [](const std::string& socket, int) {
  Engine engine(Remote(), socket);
  if (engine.code() != KVS_OK) return 1;
  raise(SIGSTOP);
  return 0;
});

const std::string kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);

// A gRPC connection that sends `bytes` and then neither sends nor reads.
UniqueFd SilentConnection(const std::string& socket, const std::string& bytes) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket.data(), socket.size());
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  return fd;
}

// One whose peer cannot be answered any more: every SETTINGS wants an answer that nobody reads.
UniqueFd DeafConnection(const std::string& socket) {
  UniqueFd fd = SilentConnection(socket, kPreface);
  std::string settings;
  for (int i = 0; i < 1000; ++i) settings += std::string("\0\0\0\4\0\0\0\0\0", 9);
  pollfd room{fd.get(), POLLOUT, 0};
  while (poll(&room, 1, 200) == 1 &&
         send(fd.get(), settings.data(), settings.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
  }
  return fd;
}

// --- tests ---------------------------------------------------------------------------------------

std::string HeadsOfCheckpoints(const std::string& tier) {
  std::string heads;
  for (const char* name : {"/checkpoint.0", "/checkpoint.1"}) {
    std::ifstream file(tier + name, std::ios::binary);
    std::string head(4096, '\0');
    file.read(head.data(), static_cast<std::streamsize>(head.size()));
    heads += head;
  }
  return heads;
}

class StopTest : public ::testing::Test {
 protected:
  void SetUp() override {
    seed_ = std::random_device{}();
    std::printf("seed %lu\n", seed_);
    random_.seed(seed_);
  }
  void TearDown() override { std::printf("slowest stop %.0f ms\n", slowest_ms_); }

  std::string tier() const { return folder_ / "tier"; }
  // With a disk that makes a checkpoint when it stops, and only then.
  std::unique_ptr<DaemonProcess> Start() const {
    return std::make_unique<DaemonProcess>(std::vector<std::string>{
        "--set", "disk.path=" + tier(), "--set", "disk.budget_bytes=32MiB", "--set",
        "disk.segment_bytes=1MiB", "--set", "disk.checkpoint_interval=0"});
  }
  void StopsCleanly(DaemonProcess* daemon) {
    const std::string before = HeadsOfCheckpoints(tier());
    const std::string socket = daemon->socket();
    const auto asked = Clock::now();
    const int status = daemon->Stop(SIGTERM);
    const std::chrono::duration<double, std::milli> took = Clock::now() - asked;
    slowest_ms_ = std::max(slowest_ms_, took.count());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(HeadsOfCheckpoints(tier()) != before) << "no checkpoint";
    EXPECT_FALSE(std::filesystem::exists(socket));
    EXPECT_FALSE(std::filesystem::exists(socket + ".attach"));
  }

  const ScratchDir folder_;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  double slowest_ms_ = 0;
};

TEST_F(StopTest, PeersThatDoNotReadHoldUpNothing) {
  auto daemon = Start();
  ClientProcess worker("remote", daemon->socket(), 1);
  ASSERT_TRUE(worker.Says('r'));
  std::vector<UniqueFd> peers;
  peers.push_back(SilentConnection(daemon->socket(), ""));
  peers.push_back(SilentConnection(daemon->socket(), kPreface));
  peers.push_back(DeafConnection(daemon->socket()));
  StopsCleanly(daemon.get());
}

TEST_F(StopTest, AtAnyMomentBesideClientsOfBothTransports) {
  for (int cycle = 0; cycle < Cycles() && !HasFailure(); ++cycle) {
    SCOPED_TRACE(cycle);
    auto daemon = Start();
    const int seed = static_cast<int>(random_() % 100000);
    ClientProcess linked("linked", daemon->socket(), seed);
    ClientProcess frozen("linked", daemon->socket(), seed + 1000);
    ClientProcess remote("remote", daemon->socket(), seed + 2000);
    ClientProcess frozen_remote("remote", daemon->socket(), seed + 3000);
    for (ClientProcess* client : {&linked, &frozen, &remote, &frozen_remote}) {
      ASSERT_TRUE(client->Says('r'));
    }
    const UniqueFd silent = SilentConnection(daemon->socket(), kPreface);
    const UniqueFd deaf = cycle % 4 == 0 ? DeafConnection(daemon->socket()) : UniqueFd();
    // The moment: anywhere in what the clients do.
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 50000));
    for (const ClientProcess* client : {&frozen, &frozen_remote}) kill(client->pid(), SIGSTOP);
    StopsCleanly(daemon.get());
    for (ClientProcess* client : {&linked, &remote}) EXPECT_EQ(client->Wait(), 0);
  }
}

// A session's end asks the daemon to close it, which may be about to end itself.
TEST_F(StopTest, ARemoteClientThatDetachesMeanwhileDoesNotHang) {
  for (int cycle = 0; cycle < Cycles() && !HasFailure(); ++cycle) {
    SCOPED_TRACE(cycle);
    auto daemon = Start();
    std::vector<std::unique_ptr<ClientProcess>> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(std::make_unique<ClientProcess>("detaching", daemon->socket(),
                                                        static_cast<int>(random_() % 20000)));
    }
    for (const auto& client : clients) ASSERT_TRUE(client->Says('r'));
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 20000));
    StopsCleanly(daemon.get());
    for (const auto& client : clients) EXPECT_EQ(client->Wait(), 0);
  }
}

// Its patience for other calls, five seconds, would be too long for an end.
TEST_F(StopTest, ARemoteClientDetachesFromADaemonThatDoesNotAnswer) {
  auto daemon = Start();
  ClientProcess client("stopping", daemon->socket());
  int status = 0;
  ASSERT_EQ(waitpid(client.pid(), &status, WUNTRACED), client.pid());
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
  kill(daemon->pid(), SIGSTOP);
  const auto asked = Clock::now();
  kill(client.pid(), SIGCONT);
  EXPECT_EQ(client.Wait(), 0);
  EXPECT_LT(Clock::now() - asked, std::chrono::seconds(4));
  kill(daemon->pid(), SIGCONT);
  StopsCleanly(daemon.get());
}

}  // namespace
}  // namespace kvstrata::testing
