// SPDX-License-Identifier: Apache-2.0
#include "server/attach/peers/attach_tokens.h"

#include <sys/random.h>

#include <algorithm>
#include <string>

#include "base/check.h"

namespace kvstrata {
namespace {

// Compares in a time that does not tell how many bytes agree.
bool Same(const AttachToken& a, const AttachToken& b) {
  uint8_t differ = 0;
  for (size_t i = 0; i < a.size(); ++i) differ |= a[i] ^ b[i];
  return differ == 0;
}

AttachToken NewToken() {
  AttachToken token;
  // So few bytes come whole, and at once: the kernel's generator was seeded when the system
  // started.
  KVS_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  return token;
}

Status TokenRefused(std::string_view reason, std::string_view what) {
  return {Code::kUnauthenticated, reason,
          "the token " + std::string(what) + "; ask for another one (Control.IssueAttachToken)"};
}

}  // namespace

Result<AttachToken> AttachTokens::Issue(uint32_t uid, const TokenGrant& grant,
                                        std::chrono::milliseconds lifetime) {
  if (lifetime > kMaxLifetime) {
    return InvalidArgument("TOKEN_LIFETIME", "lifetime_ms is " + std::to_string(lifetime.count()) +
                                                 "; allowed: up to " +
                                                 std::to_string(kMaxLifetime.count()));
  }
  const Clock::time_point now = now_();
  const AttachToken token = NewToken();
  MutexLock lock(mu_);
  std::deque<Record>& records = of_user_[uid];
  if (records.size() == kMaxTokens) {
    const auto over = std::ranges::find_if(
        records, [now](const Record& r) { return r.used || r.expires <= now; });
    if (over == records.end()) {
      return ResourceExhausted("TOKEN_LIMIT", std::to_string(kMaxTokens) +
                                                  " tokens of this user wait to be redeemed; use "
                                                  "them, or let them expire");
    }
    records.erase(over);
  }
  records.push_back({token, grant, now + (lifetime.count() == 0 ? kLifetime : lifetime)});
  return token;
}

Result<TokenGrant> AttachTokens::Redeem(uint32_t uid, const AttachToken& token) {
  const Clock::time_point now = now_();
  MutexLock lock(mu_);
  Record* found = nullptr;
  if (const auto records = of_user_.find(uid); records != of_user_.end()) {
    for (Record& record : records->second) {
      if (Same(record.token, token)) found = &record;
    }
  }
  if (found == nullptr) {
    return TokenRefused("TOKEN_UNKNOWN", "is none of this user's sessions, or was forgotten");
  }
  if (found->used) return TokenRefused("TOKEN_USED", "was used, and is good once");
  if (found->expires <= now) return TokenRefused("TOKEN_EXPIRED", "has expired");
  found->used = true;
  return found->grant;
}

}  // namespace kvstrata
