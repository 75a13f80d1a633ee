// SPDX-License-Identifier: Apache-2.0
// ReplyProxy: stands between a client and a Redis server on loopback, and has its class decide what
// becomes of each value on its way back. All else goes on as it is.
// Thread-safety: the constructor's thread; one thread of its own moves bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace kvstrata {

class ReplyProxy {
 public:
  explicit ReplyProxy(uint16_t server_port);
  // REQUIRES: Stop was called; OnValue's class does.
  virtual ~ReplyProxy() = default;

  uint16_t port() const { return port_; }

 protected:
  // A whole reply that is a value, in the proxy's thread. What goes on in its place; nothing: it
  // waits, with all that comes behind it, and is asked about again. *cut: the connection ends
  // behind it.
  virtual std::optional<std::string> OnValue(const std::string& reply, bool* cut) = 0;
  void Start();
  void Stop();

 private:
  struct Pair {
    UniqueFd client, server;
    std::string held;  // the server's, not a whole reply yet
  };
  void Serve();
  void Accept();
  // Whether both ends go on.
  bool Forward(Pair* pair, bool from_client);
  bool Answer(Pair* pair);

  const uint16_t server_port_;
  uint16_t port_ = 0;
  UniqueFd listener_;
  std::vector<Pair> pairs_;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

}  // namespace kvstrata
