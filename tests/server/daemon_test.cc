// SPDX-License-Identifier: Apache-2.0
// The daemon as a process: starts with nothing given, tells when it serves, refuses what it must,
// ends in time whatever hangs. Exit codes are those of docs/operations.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/fakes/scratch_dir.h"
#include "tests/server/attach_client.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;
using namespace test;  // NOLINT: the client of this folder

using Strings = std::vector<std::string>;

std::string ReadAll(const std::string& file) {
  std::ifstream in(file);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// One run of kvstratad, in a directory of its own user's.
class Process {
 public:
  // `stderr_fd` -1: a file that log() reads.
  Process(const Strings& command, const std::string& log_file, int stderr_fd = -1)
      : log_file_(log_file) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    ready_.Reset(ends[0]);
    UniqueFd theirs(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), kReadyFd);
    if (stderr_fd >= 0) {
      posix_spawn_file_actions_adddup2(&actions, stderr_fd, STDERR_FILENO);
    } else {
      for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
        posix_spawn_file_actions_addopen(&actions, fd, log_file.c_str(),
                                         O_WRONLY | O_CREAT | O_APPEND, 0666);
      }
    }
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    if (pid_ <= 0) return;
    Signal(SIGKILL);
    Wait();
  }

  static constexpr int kReadyFd = 9;
  static Strings ReadyFlag() { return {"--ready-fd", std::to_string(kReadyFd)}; }

  // True once it serves; false when it ended before.
  bool Ready() {
    pollfd readable{ready_.get(), POLLIN, 0};
    char byte = 0;
    return poll(&readable, 1, kDeadlineMs) == 1 && read(ready_.get(), &byte, 1) == 1;
  }
  void Signal(int signal) { kill(pid_, signal); }
  pid_t pid() const { return pid_; }
  // The exit code; 1000 + signal if one ended it; -1 after the deadline.
  int Wait() {
    int status = 0;
    if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) != 0; })) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  std::string log() const { return ReadAll(log_file_); }

 private:
  const std::string log_file_;
  UniqueFd ready_;
  pid_t pid_ = -1;
};

class DaemonTest : public testing::Test {
 protected:
  void SetUp() override {
    socket_ = directory_ / "k.sock";
    log_ = directory_ / "log";
  }

  static Strings Command(const Strings& arguments) {
    Strings command = {KVSTRATAD};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }
  std::unique_ptr<Process> Start(Strings arguments = {}, int stderr_fd = -1) {
    const Strings ready = Process::ReadyFlag();
    arguments.insert(arguments.end(), {"--socket", socket_});
    arguments.insert(arguments.end(), ready.begin(), ready.end());
    auto process = std::make_unique<Process>(Command(arguments), log_, stderr_fd);
    EXPECT_TRUE(process->Ready()) << process->log();
    return process;
  }
  // Runs to its end; the exit code.
  int Run(const Strings& arguments) {
    std::filesystem::remove(log_);
    return Process(Command(arguments), log_).Wait();
  }
  std::string Output() const { return ReadAll(log_); }
  std::string attach() const { return socket_ + ".attach"; }

  const ScratchDir directory_;
  std::string socket_, log_;
};

TEST_F(DaemonTest, ServesWithNothingButASocket) {
  auto daemon = Start();
  auto client = Client::Attach(attach());
  ASSERT_TRUE(client);
  EXPECT_TRUE(client->Call(shm::kPing).ok());
  EXPECT_TRUE(Dial(socket_, SOCK_STREAM)) << "gRPC";
  for (const std::string& path : {socket_, attach()}) {
    struct stat st {};
    ASSERT_EQ(lstat(path.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode, mode_t{S_IFSOCK | 0660}) << path;
  }
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0) << Output();
  EXPECT_TRUE(SawEof(client->socket()));
  EXPECT_FALSE(std::filesystem::exists(socket_));
  EXPECT_FALSE(std::filesystem::exists(attach()));
  EXPECT_THAT(Output(), HasSubstr("event=ready"));
  EXPECT_THAT(Output(), HasSubstr("event=stopped"));
}

TEST_F(DaemonTest, ReadySaysWhatThePoolsHold) {
  auto daemon = Start({"--set", "pool.device=emulated:2", "--set", "pool.device_bytes=64MiB",
                       "--set", "pool.host_bytes=32MiB"});
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0) << Output();
  EXPECT_THAT(Output(), HasSubstr("devices=2 device_bytes=134217728 host_bytes=33554432"));
}

TEST_F(DaemonTest, IdleIsSmall) {
  auto daemon = Start();
  std::ifstream status("/proc/" + std::to_string(daemon->pid()) + "/status");
  uint64_t rss_kib = 0;
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> rss_kib;
  }
  RecordProperty("rss_kib", std::to_string(rss_kib));
  EXPECT_GT(rss_kib, 0u);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(rss_kib, 64u * 1024);
#endif
}

// Nobody may have to remove gigabytes after a mistake in the configuration.
TEST_F(DaemonTest, AStartThatFindsAnAddressTakenReservesNoDisk) {
  const UniqueFd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  ASSERT_EQ(getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string tier = directory_ / "tier";
  const Strings disk = {"--set", "disk.path=" + tier,       "--set", "disk.budget_bytes=64MiB",
                        "--set", "disk.segment_bytes=16MiB"};
  Strings http = disk;
  http.insert(http.end(), {"--socket", socket_, "--set",
                           "http.listen=127.0.0.1:" + std::to_string(ntohs(address.sin_port))});
  EXPECT_EQ(Run(http), 3);
  EXPECT_THAT(Output(), HasSubstr("HTTP_IN_USE"));
  EXPECT_FALSE(std::filesystem::exists(tier));
  std::ofstream(attach()) << "no socket";
  Strings occupied = disk;
  occupied.insert(occupied.end(), {"--socket", socket_});
  EXPECT_NE(Run(occupied), 0);
  EXPECT_THAT(Output(), HasSubstr("SOCKET_PATH"));
  EXPECT_FALSE(std::filesystem::exists(tier));
  EXPECT_FALSE(std::filesystem::exists(socket_));
}

TEST_F(DaemonTest, SecondDaemonIsRefused) {
  auto first = Start();
  EXPECT_EQ(Run({"--socket", socket_}), 3);
  EXPECT_THAT(Output(), HasSubstr("SOCKET_IN_USE"));
  EXPECT_THAT(Output(), HasSubstr("pid " + std::to_string(first->pid())));
  EXPECT_TRUE(Client::Attach(attach())) << "the first one was not touched";
}

TEST_F(DaemonTest, RestartsAfterKill) {
  for (int i = 0; i < 3; ++i) {
    auto daemon = Start();
    EXPECT_TRUE(Client::Attach(attach()));
    daemon->Signal(SIGKILL);
    EXPECT_EQ(daemon->Wait(), 1000 + SIGKILL);
    EXPECT_TRUE(std::filesystem::exists(attach())) << "stale, to be replaced";
  }
}

// A client that never reads and never ends must not hold the daemon up.
TEST_F(DaemonTest, EndsInTimeWithClientsThatHang) {
  auto daemon = Start();
  auto client = Client::Attach(attach());
  ASSERT_TRUE(client);
  while (client->Send(shm::kPing, 1, {})) {  // fills the reply ring, the backlog, the request ring
  }
  const UniqueFd silent = Dial(attach()), grpc = Dial(socket_, SOCK_STREAM);
  const auto asked = std::chrono::steady_clock::now();
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0) << Output();
  EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(5));
}

// Nobody reads the log: even its lines cannot hold up the end. The watchdog takes no lock.
TEST_F(DaemonTest, EndsInTimeWhenItsLogIsStuck) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  auto daemon = Start({"--set", "shutdown.timeout=500ms"}, writer.get());
  ASSERT_EQ(fcntl(writer.get(), F_SETFL, O_NONBLOCK), 0);
  const std::string block(4096, '.');
  while (write(writer.get(), block.data(), block.size()) > 0) {
  }
  while (write(writer.get(), block.data(), 1) > 0) {
  }
  ASSERT_EQ(fcntl(writer.get(), F_SETFL, 0), 0);  // shared with the daemon: it blocks again
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 1);
}

TEST_F(DaemonTest, SignalsAreAnswered) {
  auto daemon = Start();
  daemon->Signal(SIGHUP);
  ASSERT_TRUE(Eventually(
      [&] { return daemon->log().find("event=reloaded by=SIGHUP") != std::string::npos; }));
  EXPECT_TRUE(Client::Attach(attach()));
  daemon->Signal(SIGINT);
  EXPECT_EQ(daemon->Wait(), 0);
}

TEST_F(DaemonTest, SignalsThatMeanNothingEndNothing) {
  auto daemon = Start();
  for (const int signal : {SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGPWR, SIGSTKFLT,
                           SIGRTMIN, SIGRTMAX}) {
    daemon->Signal(signal);
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) daemon->Signal(signal);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGALRM}) {
    ASSERT_TRUE(Eventually([&] {
      return daemon->log().find(std::string("signal=\"") + strsignal(signal)) != std::string::npos;
    })) << strsignal(signal)
        << daemon->log();
  }
  EXPECT_THAT(daemon->log(), HasSubstr("event=signal_ignored"));
  auto client = Client::Attach(attach());
  ASSERT_TRUE(client);
  EXPECT_TRUE(client->Call(shm::kPing).ok());
  daemon->Signal(SIGQUIT);
  EXPECT_EQ(daemon->Wait(), 0) << "as Ctrl-\\ at a terminal ends it";
}

// The kernel then answers writes with EFBIG instead of ending the process.
TEST_F(DaemonTest, ALimitOnFilesIsNoDeath) {
  Process daemon({"prlimit", "--fsize=65536", KVSTRATAD, "--socket", socket_,
                  Process::ReadyFlag()[0], Process::ReadyFlag()[1]},
                 log_);
  if (daemon.Ready()) {
    Client::Attach(attach());  // which makes memory larger than the limit
    daemon.Signal(SIGTERM);
  }
  EXPECT_LT(daemon.Wait(), 2) << daemon.log();
}

TEST_F(DaemonTest, WithoutThreadsItDoesNotStartAndSaysSo) {
  if (geteuid() != 0) GTEST_SKIP() << "takes another user, which root alone may";
  ASSERT_EQ(chown(directory_.path().c_str(), 61235, 61235), 0);
  Process daemon({"prlimit", "--nproc=12:12", "setpriv", "--reuid=61235", "--regid=61235",
                  "--clear-groups", "--bounding-set=-all", KVSTRATAD, "--socket", socket_,
                  Process::ReadyFlag()[0], Process::ReadyFlag()[1]},
                 log_);
  EXPECT_FALSE(daemon.Ready());
  EXPECT_EQ(daemon.Wait(), 1);
  EXPECT_THAT(daemon.log(), HasSubstr("reason=THREADS"));
}

// Dials as another user; `Dial` is ours.
UniqueFd DialAs(uid_t uid, const std::string& path) {
  UniqueFd fd;
  // On a thread of its own: the raw system call changes this thread's user alone.
  std::thread([&] {
    if (syscall(SYS_setresuid, -1, uid, -1) == 0) fd = Dial(path, SOCK_STREAM);
  }).join();
  return fd;
}

// Processes of the daemon's user that take all it may have.
class Crowd {
 public:
  Crowd(uid_t uid, int size) {
    for (int i = 0; i < size; ++i) {
      pids_.push_back(fork());
      if (pids_.back() != 0) continue;
      if (setuid(uid) == 0) pause();
      _exit(1);
    }
    for (const pid_t pid : pids_) {
      EXPECT_TRUE(Eventually([&] {
        struct stat st {};
        return stat(("/proc/" + std::to_string(pid)).c_str(), &st) == 0 && st.st_uid == uid;
      }));
    }
  }
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;
  ~Crowd() {
    for (const pid_t pid : pids_) kill(pid, SIGKILL);
    for (const pid_t pid : pids_) waitpid(pid, nullptr, 0);
  }

 private:
  std::vector<pid_t> pids_;
};

TEST_F(DaemonTest, ANewUserNeedsNoThread) {
  if (geteuid() != 0) GTEST_SKIP() << "takes other users, which root alone may";
  constexpr uid_t kDaemon = 61236, kOther = 61237;
  ASSERT_EQ(chown(directory_.path().c_str(), kDaemon, kDaemon), 0);
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  Process daemon({"prlimit", "--nproc=80:80", "setpriv", "--reuid=" + std::to_string(kDaemon),
                  "--regid=" + std::to_string(kDaemon), "--clear-groups", "--bounding-set=-all",
                  KVSTRATAD, "--socket", socket_, Process::ReadyFlag()[0], Process::ReadyFlag()[1]},
                 log_);
  ASSERT_TRUE(daemon.Ready()) << daemon.log();
  ASSERT_EQ(chmod(socket_.c_str(), 0666), 0);
  const Crowd crowd(kDaemon, 80);
  const UniqueFd peer = DialAs(kOther, socket_);
  ASSERT_TRUE(peer);
  const std::string hello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
  ASSERT_EQ(send(peer.get(), hello.data(), hello.size(), MSG_NOSIGNAL), 33);
  char answer[9];
  pollfd answered{peer.get(), POLLIN, 0};
  ASSERT_EQ(poll(&answered, 1, kDeadlineMs), 1);
  EXPECT_EQ(read(peer.get(), answer, sizeof(answer)), 9) << daemon.log();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.log();
}

// A client may pass a descriptor whose close() lasts; it must not be closed where calls are served.
TEST_F(DaemonTest, NobodyPassesDescriptorsToGrpc) {
  auto daemon = Start();
  const UniqueFd grpc = Dial(socket_, SOCK_STREAM);
  char byte = 'P';
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int passed = STDIN_FILENO;
  std::memcpy(CMSG_DATA(header), &passed, sizeof(passed));
  const ssize_t sent = sendmsg(grpc.get(), &message, MSG_NOSIGNAL);
  if (sent == 1) {  // Linux before 6.16, which the daemon says
    EXPECT_THAT(daemon->log(), HasSubstr("event=descriptors_accepted"));
  } else {
    EXPECT_EQ(errno, EPERM);
  }
}

TEST_F(DaemonTest, TellsTheServiceManager) {
  const std::string path = directory_ / "notify";
  const UniqueFd notify(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(bind(notify.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(setenv("NOTIFY_SOCKET", path.c_str(), 1), 0);
  auto daemon = Start();
  unsetenv("NOTIFY_SOCKET");
  const auto text = [&notify] {
    const Packet packet = Receive(notify.get());
    return std::string(reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size());
  };
  EXPECT_EQ(text(), "READY=1");
  daemon->Signal(SIGTERM);
  EXPECT_EQ(text(), "STOPPING=1");
  EXPECT_EQ(daemon->Wait(), 0);
}

TEST_F(DaemonTest, ExitCodes) {
  EXPECT_EQ(Run({"--help"}), 0);
  EXPECT_THAT(Output(), HasSubstr("--ready-fd"));
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_THAT(Output(), HasSubstr(KVS_VERSION));
  EXPECT_EQ(Run({"--no-such-flag"}), 2);
  EXPECT_EQ(Run({"--socket"}), 2);
  EXPECT_EQ(Run({"--socket", socket_, "--set", "pool.device_byte=1GiB"}), 2);
  EXPECT_THAT(Output(), HasSubstr("did you mean 'pool.device_bytes'?"));
  EXPECT_EQ(Run({"--socket", socket_, "--set", "pool.device_bytes=lots"}), 2);
  EXPECT_EQ(Run({"--socket", socket_, "--log-level", "loud"}), 2);
  EXPECT_EQ(Run({"--socket", socket_, "--config", directory_ / "none.toml"}), 2);
  EXPECT_EQ(Run({"--socket", socket_, "--ready-fd", "77"}), 2);
  EXPECT_EQ(Run({"--socket", directory_.path()}), 2) << "a directory";
  EXPECT_THAT(Output(), HasSubstr("is a directory"));
  EXPECT_EQ(Run({"--socket", directory_ / "no/k.sock"}), 2);
  EXPECT_THAT(Output(), HasSubstr("mkdir -p"));
  EXPECT_EQ(Run({"--socket", "/tmp/" + std::string(120, 'x')}), 2);
  EXPECT_THAT(Output(), HasSubstr("at most 100"));
}

TEST_F(DaemonTest, CheckConfig) {
  const std::string file = std::filesystem::path(directory_ / "k.toml").lexically_normal();
  std::ofstream(file) << "[pool]\ndevice_bytes = \"1GiB\"\n[plans.long]\npreset = \"quest\"\n"
                         "budget = 4096\n";
  EXPECT_EQ(Run({"--check-config", "--config", file}), 0);
  EXPECT_THAT(Output(), HasSubstr("configuration ok"));
  EXPECT_THAT(Output(), HasSubstr("pool.device_bytes = 1GiB  (" + file + ":2:"));
  EXPECT_THAT(Output(), HasSubstr("pool.arena_bytes = 0  (default)"));
  std::filesystem::create_directory(directory_ / "conf.d");
  std::ofstream(directory_ / "conf.d/10-sizes.toml") << "\nwork.cpus = \"1023\"\n";
  EXPECT_EQ(Run({"--check-config", "--config", file}), 1);
  EXPECT_THAT(Output(), HasSubstr("conf.d/10-sizes.toml:2:")) << "what the machine lacks, too";
  std::filesystem::remove_all(directory_ / "conf.d");
  std::ofstream(file) << "[pool]\ndevice_byte = \"1GiB\"\n";
  EXPECT_EQ(Run({"--check-config", "--config", file}), 1);
  EXPECT_THAT(Output(), HasSubstr("k.toml:2:"));
  EXPECT_FALSE(std::filesystem::exists(socket_));
}

TEST_F(DaemonTest, OpensADiskTierAndLeavesACheckpoint) {
  const std::string disk = directory_ / "disk";
  const Strings flags = {"--set", "disk.path=" + disk,        "--set", "disk.budget_bytes=1MiB",
                         "--set", "disk.segment_bytes=256KiB"};
  Strings command = {"--socket", directory_ / "other.sock"};
  command.insert(command.end(), flags.begin(), flags.end());
  {
    auto daemon = Start(flags);
    EXPECT_THAT(Output(), HasSubstr("event=disk_open"));
    EXPECT_EQ(Run(command), 3);
    EXPECT_THAT(Output(), HasSubstr("DISK_LOCKED"));
    daemon->Signal(SIGTERM);
    EXPECT_EQ(daemon->Wait(), 0);
  }
  std::ifstream checkpoint(disk + "/checkpoint.1", std::ios::binary);
  char magic[8];
  checkpoint.seekg(16);
  checkpoint.read(magic, sizeof(magic));
  EXPECT_EQ(std::string(magic, sizeof(magic)), "KVSCHKP1") << "docs/disk_format.md";
  command.insert(command.end(), {"--set", "disk.budget_bytes=64KiB"});
  EXPECT_EQ(Run(command), 2);
  EXPECT_THAT(Output(), HasSubstr("DISK_BUDGET"));
  command.push_back("--check-config");
  EXPECT_EQ(Run(command), 1);
}

TEST_F(DaemonTest, JsonLog) {
  auto daemon = Start({"--set", "log.format=json"});
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0);
  std::istringstream lines(Output());
  int n = 0;
  for (std::string line; std::getline(lines, line); ++n) {
    EXPECT_EQ(line.front(), '{') << line;
    EXPECT_EQ(line.back(), '}') << line;
  }
  EXPECT_GE(n, 3);
  EXPECT_THAT(Output(), HasSubstr(R"("level":"info","event":"ready","socket":")" + socket_));
}

// As nobody without any capability: what root never sees.
class NobodyDaemonTest : public DaemonTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root to become nobody";
    DaemonTest::SetUp();
    ASSERT_EQ(chmod(directory_.path().c_str(), 01777), 0);
  }
  static Strings AsNobody(const Strings& arguments) {
    Strings command = {"setpriv",        "--reuid=65534",       "--regid=65534",
                       "--clear-groups", "--bounding-set=-all", KVSTRATAD};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }
  int RunAsNobody(const Strings& arguments) {
    std::filesystem::remove(log_);
    return Process(AsNobody(arguments), log_).Wait();
  }
};

TEST_F(NobodyDaemonTest, Serves) {
  Strings arguments = {"--socket", socket_};
  const Strings ready = Process::ReadyFlag();
  arguments.insert(arguments.end(), ready.begin(), ready.end());
  Process daemon(AsNobody(arguments), log_);
  if (!daemon.Ready() && daemon.log().find("No such file or directory") != std::string::npos) {
    GTEST_SKIP() << "nobody may not read the build directory";
  }
  auto client = Client::Attach(attach());
  ASSERT_TRUE(client) << daemon.log();
  const Reply open = client->Open(client->Register(), "full", Tokens(64));
  EXPECT_TRUE(open.ok()) << open.error.message;
  EXPECT_EQ(Receive(client->socket()).type(), shm::kArena);
  const std::string proc = "/proc/" + std::to_string(daemon.pid()) + "/fd";
  struct stat st {};
  ASSERT_EQ(stat(proc.c_str(), &st), 0);
  EXPECT_EQ(st.st_uid, 0u) << "not dumpable: its own user cannot look inside";
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.log();
}

TEST_F(NobodyDaemonTest, PermissionIsExitCode4) {
  const std::string closed = directory_ / "closed";
  ASSERT_EQ(mkdir(closed.c_str(), 0755), 0);
  EXPECT_EQ(RunAsNobody({"--socket", closed + "/k.sock"}), 4);
  EXPECT_THAT(Output(), HasSubstr("Permission denied"));
  const std::string secret = directory_ / "secret.toml";
  std::ofstream(secret) << "";
  ASSERT_EQ(chmod(secret.c_str(), 0600), 0);
  EXPECT_EQ(RunAsNobody({"--socket", socket_, "--config", secret}), 4);
  auto daemon = Start();
  EXPECT_EQ(RunAsNobody({"--socket", socket_}), 4) << "root's lock file";
}

}  // namespace
}  // namespace kvstrata
