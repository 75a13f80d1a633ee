// SPDX-License-Identifier: Apache-2.0
#include "client/cli/daemon_program.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "base/unique_fd.h"
#include "client/cli/invocation.h"

extern char** environ;

namespace kvstrata::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Reads `fd` to its end; false at the deadline.
bool ReadAll(int fd, Clock::time_point deadline, std::string* out) {
  std::array<char, 4096> part;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd wait{fd, POLLIN, 0};
    if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) == 0) return false;
    const ssize_t n = read(fd, part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return true;
    out->append(part.data(), static_cast<size_t>(n));
  }
}

}  // namespace

std::string DaemonProgram() {
  std::array<char, 4096> self{};
  const ssize_t n = readlink("/proc/self/exe", self.data(), self.size() - 1);
  std::string path(self.data(), n > 0 ? static_cast<size_t>(n) : 0);
  path = path.substr(0, path.rfind('/') + 1) + "kvstratad";
  return n > 0 && access(path.c_str(), X_OK) == 0 ? path : "kvstratad";
}

Result<Finished> RunChild(std::vector<std::string> command, std::chrono::milliseconds timeout,
                          std::string* unfinished) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return Internal("PIPE", std::strerror(errno));
  UniqueFd reader(ends[0]), writer(ends[1]);
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, writer.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, writer.get(), STDERR_FILENO);
  pid_t child = -1;
  const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return NotFound("DAEMON_PROGRAM_MISSING",
                    command[0] + ": " + std::strerror(error) +
                        "; it is looked for beside this program and on PATH");
  }
  writer.Reset();
  Finished finished;
  const bool ended = ReadAll(reader.get(), Clock::now() + timeout, &finished.output);
  if (!ended) kill(child, SIGKILL);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!ended) {
    if (unfinished != nullptr) *unfinished = std::move(finished.output);
    return Status(Code::kDeadlineExceeded, "DEADLINE",
                  command[0] + " did not finish in " + std::to_string(timeout.count()) + " ms");
  }
  finished.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
  return finished;
}

}  // namespace kvstrata::cli
