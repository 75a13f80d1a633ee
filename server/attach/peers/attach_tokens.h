// SPDX-License-Identifier: Apache-2.0
// AttachTokens: what a session's owner gets over gRPC, and a process of the same user redeems at
// the attach socket for descriptors of the session's memory (docs/shm_layout.md, "Without the
// library").
//
// A token is 128 random bits, good once and for its lifetime. Tokens of another user are none:
// whoever presents one hears TOKEN_UNKNOWN, as for any other bytes. Those that were used or have
// expired are remembered for a while, to be refused by that name.
//
// Thread-safety: any thread, one lock around a look at kMaxTokens records. Memory: kMaxTokens of a
// user.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

using AttachToken = std::array<uint8_t, 16>;

// What a token is good for.
struct TokenGrant {
  uint64_t session = 0;
  bool writable = false;  // Store::PassArenas
};

class AttachTokens {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMaxTokens = 64;  // tokens of a user
  static constexpr std::chrono::milliseconds kLifetime{10'000};
  static constexpr std::chrono::milliseconds kMaxLifetime{60'000};

  // now: tests set it.
  explicit AttachTokens(std::function<Clock::time_point()> now = Clock::now)
      : now_(std::move(now)) {}

  // lifetime: 0 is kLifetime. INVALID_ARGUMENT TOKEN_LIFETIME; RESOURCE_EXHAUSTED TOKEN_LIMIT: so
  // many of the user's wait to be redeemed.
  Result<AttachToken> Issue(uint32_t uid, const TokenGrant& grant,
                            std::chrono::milliseconds lifetime = {}) KVS_EXCLUDES(mu_);
  // What the token is good for; it is good for nothing behind it. UNAUTHENTICATED TOKEN_UNKNOWN,
  // TOKEN_USED, TOKEN_EXPIRED.
  Result<TokenGrant> Redeem(uint32_t uid, const AttachToken& token) KVS_EXCLUDES(mu_);

 private:
  struct Record {
    AttachToken token;
    TokenGrant grant;
    Clock::time_point expires;
    bool used = false;
  };

  const std::function<Clock::time_point()> now_;
  Mutex mu_;
  std::unordered_map<uint32_t, std::deque<Record>> of_user_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
