// SPDX-License-Identifier: Apache-2.0
// HoldingProxy: holds back a Redis server's values that are larger than so many bytes, until it is
// told to let them go. Behind such a value nothing comes on its connection.
// Thread-safety: as ReplyProxy's; Release and held from any thread.
#pragma once

#include "tests/server/tier/reply_proxy.h"

namespace kvstrata {

class HoldingProxy final : public ReplyProxy {
 public:
  HoldingProxy(uint16_t server_port, size_t bytes) : ReplyProxy(server_port), bytes_(bytes) {
    Start();
  }
  ~HoldingProxy() override { Stop(); }

  void Release() { released_ = true; }
  // Whether it ever held one back.
  bool held() const { return held_; }

 private:
  std::optional<std::string> OnValue(const std::string& reply, bool*) override {
    if (reply.size() <= bytes_ || released_) return reply;
    held_ = true;
    return std::nullopt;
  }

  const size_t bytes_;
  std::atomic<bool> released_ = false, held_ = false;
};

}  // namespace kvstrata
