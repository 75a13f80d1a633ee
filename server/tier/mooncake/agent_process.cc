// SPDX-License-Identifier: Apache-2.0
#include "server/tier/mooncake/agent_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvstrata {
namespace {

constexpr int kFirstDescriptor = 16;  // ours lie above the child's, so that none is overrun

// A descriptor like it that is none of those that the child gets.
UniqueFd Above(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, kFirstDescriptor)); }

// What posix_spawn is told, freed with the object.
class SpawnPlan {
 public:
  SpawnPlan(int socket, int memory) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
    posix_spawn_file_actions_addopen(&actions_, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions_, socket, AgentProcess::kSocket);
    posix_spawn_file_actions_adddup2(&actions_, memory, AgentProcess::kMemory);
    posix_spawn_file_actions_addclosefrom_np(&actions_, AgentProcess::kMemory + 1);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  int Spawn(std::vector<std::string> words, pid_t* pid) const {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    return posix_spawn(pid, argv.front(), &actions_, &attributes_, argv.data(), environ);
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// How a process ended, in words.
std::string EndOf(int status) {
  if (WIFSIGNALED(status)) return "it was ended by signal " + std::to_string(WTERMSIG(status));
  const int code = WEXITSTATUS(status);
  const std::string text = "it ended with exit code " + std::to_string(code);
  if (code == 2) return text + ": its program is not there, or its arguments are wrong";
  if (code == 5) {
    return text +
           ": its Python has no Mooncake; PYTHON -m pip install "
           "mooncake-transfer-engine-non-cuda (docs/mooncake.md)";
  }
  return code == 3 ? text + ": it could not set up the store; why is on stderr" : text;
}

}  // namespace

Status AgentError(const char* call, int error) {
  return Unavailable("MOONCAKE_AGENT", std::string(call) + ": " + std::strerror(error));
}

Status AgentProcess::Start(std::vector<std::string> words, int memory) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return AgentError("socketpair", errno);
  }
  UniqueFd ours(pair[0]);
  const UniqueFd low(pair[1]);
  const UniqueFd theirs = Above(low.get()), shared = Above(memory);
  if (!theirs || !shared) return AgentError("fcntl", errno);
  pid_t pid = 0;
  const SpawnPlan plan(theirs.get(), shared.get());
  const std::string program = words.front();
  if (const int error = plan.Spawn(std::move(words), &pid); error != 0) {
    return AgentError(program.c_str(), error);
  }
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd) {
    const int error = errno;
    kill(pid, SIGKILL);
    (void)waitpid(pid, nullptr, 0);
    return AgentError("pidfd_open", error);
  }
  socket_ = std::move(ours);
  pidfd_ = std::move(pidfd);
  pid_ = pid;
  return OkStatus();
}

void AgentProcess::Kill() {
  socket_.Reset();
  (void)kill(pid_, SIGKILL);  // it is not reaped yet, so that the number is its own
}

std::optional<std::string> AgentProcess::Reap() {
  int status = 0;
  if (pid_ == 0 || waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  socket_.Reset();
  pidfd_.Reset();
  pid_ = 0;
  return EndOf(status);
}

void AgentProcess::End() {
  if (pid_ == 0) return;
  Kill();
  (void)waitpid(pid_, nullptr, 0);
  pidfd_.Reset();
  pid_ = 0;
}

}  // namespace kvstrata
