// SPDX-License-Identifier: Apache-2.0
// LyingProxy: stands between a client and a Redis server on loopback and changes some of the values
// on their way back: a bit flipped, cut off, or an earlier value in its place.
// Thread-safety: the constructor's thread; one thread of its own moves bytes.
#ifndef KVSTRATA_TESTS_SERVER_TIER_LYING_PROXY_H_
#define KVSTRATA_TESTS_SERVER_TIER_LYING_PROXY_H_

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace kvstrata {

class LyingProxy {
 public:
  LyingProxy(uint16_t server_port, uint64_t seed);
  ~LyingProxy();

  uint16_t port() const { return port_; }
  // Values that were flipped, cut, and replaced.
  uint64_t flips() const { return flips_; }
  uint64_t cuts() const { return cuts_; }
  uint64_t swaps() const { return swaps_; }

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
  bool Lie(Pair* pair, std::string value);

  const uint16_t server_port_;
  uint16_t port_ = 0;
  UniqueFd listener_;
  std::vector<Pair> pairs_;
  std::vector<std::string> earlier_;  // whole replies that are values
  std::mt19937_64 random_;
  std::atomic<uint64_t> flips_ = 0, cuts_ = 0, swaps_ = 0;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_TESTS_SERVER_TIER_LYING_PROXY_H_
