// SPDX-License-Identifier: Apache-2.0
// RedisProcess: a redis-server of one's own on a free port of this machine, of no cluster, that
// keeps nothing on disk. Killed at the end. Not thread-safe.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "base/unique_fd.h"

namespace kvstrata::testing {

class RedisProcess {
 public:
  RedisProcess() : port_(FreePort()) {
    const std::string port = std::to_string(port_);
    pid_ = fork();
    if (pid_ == 0) {
      // Debian's redis-tools has the server under this name; it is what it is called as.
      execlp("redis-check-rdb", "redis-server", "--port", port.c_str(), "--bind", "127.0.0.1",
             "--save", "", "--appendonly", "no", "--logfile", "/dev/null", nullptr);
      _exit(127);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!Answers() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_TRUE(Answers()) << "no redis-server comes up; is redis-tools installed?";
  }
  RedisProcess(const RedisProcess&) = delete;
  RedisProcess& operator=(const RedisProcess&) = delete;
  ~RedisProcess() { Kill(); }

  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  uint16_t port() const { return port_; }

 private:
  static sockaddr_in At(uint16_t port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(port);
    return at;
  }
  static uint16_t FreePort() {
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in at = At(0);
    socklen_t size = sizeof(at);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
    return ntohs(at.sin_port);
  }
  bool Answers() const {
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in at = At(port_);
    return connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)) == 0;
  }

  const uint16_t port_;
  pid_t pid_ = -1;
};

}  // namespace kvstrata::testing
