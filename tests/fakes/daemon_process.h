// SPDX-License-Identifier: Apache-2.0
// DaemonProcess: a kvstratad of one's own on a temporary socket, for tests and benchmarks. Stops it
// with SIGTERM and removes the folder at the end. Not thread-safe.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {

class DaemonProcess {
 public:
  // Starts $KVSTRATAD (a sanitized one, say), else bin/kvstratad beside this program, with `extra`
  // flags; waits at most 10 s for its readiness. Exits the program with a message when it does not
  // come up.
  explicit DaemonProcess(const std::vector<std::string>& extra = {}) {
    int ready[2];
    if (pipe(ready) != 0) Fail("pipe");
    const auto begin = std::chrono::steady_clock::now();
    pid_ = fork();
    if (pid_ == 0) {
      close(ready[0]);
      Exec(ready[1], extra);
    }
    close(ready[1]);
    pollfd p{ready[0], POLLIN, 0};
    char byte = 0;
    if (poll(&p, 1, 10000) != 1 || read(ready[0], &byte, 1) != 1)
      Fail("kvstratad did not get ready");
    close(ready[0]);
    ready_us_ =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  }
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;
  ~DaemonProcess() {
    if (pid_ > 0) Stop(SIGTERM);
  }

  // Sends the signal and waits for its end; its exit status as of waitpid.
  int Stop(int signal) {
    int status = 0;
    kill(pid_, signal);
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

  std::string socket() const { return folder_ / "k.sock"; }
  pid_t pid() const { return pid_; }
  double ready_us() const { return ready_us_; }  // from fork to its readiness

 private:
  [[noreturn]] static void Fail(const char* what) {
    std::perror(what);
    std::exit(1);
  }
  void Exec(int ready_fd, const std::vector<std::string>& extra) {
    const char* const named = std::getenv("KVSTRATAD");
    const std::string binary = named != nullptr ? named
                                                : std::filesystem::read_symlink("/proc/self/exe")
                                                      .replace_filename("kvstratad")
                                                      .string();
    std::vector<std::string> args = {
        binary,  "--socket",      socket(), "--ready-fd", std::to_string(ready_fd),
        "--set", "log.level=warn"};
    args.insert(args.end(), extra.begin(), extra.end());
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    execv(binary.c_str(), argv.data());
    std::perror(binary.c_str());
    _exit(127);
  }

  const ScratchDir folder_;
  pid_t pid_ = -1;
  double ready_us_ = 0;
};

}  // namespace kvstrata::testing
