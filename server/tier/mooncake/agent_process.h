// SPDX-License-Identifier: Apache-2.0
// AgentProcess: a child that shares a memory and a socket with this process, and has no other
// descriptor of its: 3 is its end of a SOCK_SEQPACKET, 4 the memory. It reads nothing, and writes
// what it says to our stderr.
//
// Thread-safety: none. Blocking: End, until the child is dead.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

// UNAVAILABLE MOONCAKE_AGENT: what failed, and errno.
Status AgentError(const char* call, int error);

class AgentProcess {
 public:
  static constexpr int kSocket = 3, kMemory = 4;  // the child's descriptors

  AgentProcess() = default;
  AgentProcess(const AgentProcess&) = delete;
  AgentProcess& operator=(const AgentProcess&) = delete;
  ~AgentProcess() { End(); }

  // `words`: a path, and arguments. UNAVAILABLE MOONCAKE_AGENT. REQUIRES: none runs.
  Status Start(std::vector<std::string> words, int memory);

  pid_t pid() const { return pid_; }            // 0: none runs
  int socket() const { return socket_.get(); }  // -1: none runs, or it is killed
  int end() const { return pidfd_.get(); }      // to poll: readable when it has ended
  // SIGKILL, and no more of its words.
  void Kill();
  // How it ended, in words, if it has: then it touches the memory no more, and none runs.
  std::optional<std::string> Reap();
  // Kills it, if one runs, and waits until it is dead.
  void End();

 private:
  pid_t pid_ = 0;
  UniqueFd socket_, pidfd_;
};

}  // namespace kvstrata
