// SPDX-License-Identifier: Apache-2.0
// Real Redis servers for tests: one, or a cluster, on loopback in a folder of their own. All are
// killed with the object, or with the test.
//
// Debian's redis-tools has the server without a service: redis-check-rdb, by its other name.
// Thread-safety: none. Errors abort the test.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "server/tier/redis/client/redis_op.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata {

struct RedisServersOptions {
  uint32_t masters = 1;
  uint32_t replicas = 0;    // for each master
  bool cluster = false;     // else one master
  uint64_t max_memory = 0;  // bytes of each server; 0: no limit
  std::string policy = "allkeys-lru";
  std::string password;
  bool tls = false;  // then without TLS nobody is answered
};

class RedisServers {
 public:
  explicit RedisServers(const RedisServersOptions& options = {});
  ~RedisServers();

  size_t count() const { return servers_.size(); }
  uint16_t port(size_t i) const { return servers_[i].port; }
  std::string address(size_t i) const { return "127.0.0.1:" + std::to_string(port(i)); }
  std::vector<std::string> addresses() const;
  // Masters come first, in the order of their slots; then their replicas.
  size_t masters() const { return options_.masters; }

  void Stop(size_t i);      // SIGSTOP
  void Continue(size_t i);  // SIGCONT
  void Kill(size_t i);      // kill -9
  void Start(size_t i);     // again, empty, at its port

  // A reply to a command; waits for it.
  redis::RespReply Ask(size_t i, const std::vector<std::string>& command) const;
  // All that it keeps, as it writes it to disk, uncompressed.
  std::string Dump(size_t i) const;
  // Moves a slot with what it has to another master; in two halves, between which it is on its way.
  void BeginMove(uint16_t slot, size_t from, size_t to);
  void MoveKeys(uint16_t slot, size_t from, size_t to, size_t most);
  void EndMove(uint16_t slot, size_t from, size_t to);
  // Files of the authority, and of a certificate for 127.0.0.1; with `tls`.
  std::string authority_file() const { return dir_ / "ca.crt"; }
  // Until all nodes agree that the cluster is well and every replica follows.
  void AwaitCluster() const;

 private:
  struct Server {
    uint16_t port = 0;
    pid_t pid = 0;
    std::string id;
  };
  void Spawn(Server* server);
  void AwaitAnswer(size_t i) const;
  void FormCluster();
  void MakeCertificates() const;

  const RedisServersOptions options_;
  const ScratchDir dir_{"/dev/shm"};
  std::vector<Server> servers_;
};

}  // namespace kvstrata
