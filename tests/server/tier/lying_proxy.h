// SPDX-License-Identifier: Apache-2.0
// LyingProxy: changes some of a Redis server's values on their way back: a bit flipped, cut off, or
// an earlier value in its place.
// Thread-safety: as ReplyProxy's; counters from any thread.
#pragma once

#include <random>

#include "tests/server/tier/reply_proxy.h"

namespace kvstrata {

class LyingProxy final : public ReplyProxy {
 public:
  LyingProxy(uint16_t server_port, uint64_t seed) : ReplyProxy(server_port), random_(seed) {
    Start();
  }
  ~LyingProxy() override { Stop(); }

  // Values that were flipped, cut, and replaced.
  uint64_t flips() const { return flips_; }
  uint64_t cuts() const { return cuts_; }
  uint64_t swaps() const { return swaps_; }

 private:
  std::optional<std::string> OnValue(const std::string& reply, bool* cut) override;

  std::vector<std::string> earlier_;  // whole replies that are values
  std::mt19937_64 random_;
  std::atomic<uint64_t> flips_ = 0, cuts_ = 0, swaps_ = 0;
};

}  // namespace kvstrata
