// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/write_health.h"

#include <bit>

namespace kvstrata {
namespace {

// What the client tells, and a caller that went away, is no refusal of a write.
bool Counts(const Status& status) {
  if (status.reason() == "REDIS_LEFT_ALONE" || status.reason() == "REDIS_DOWN") return false;
  return status.code() == Code::kUnavailable || status.code() == Code::kResourceExhausted ||
         status.code() == Code::kDeadlineExceeded;
}

}  // namespace

void WriteHealth::Note(const std::string& server, const Status& status, Time now) {
  MutexLock lock(mu_);
  if (status.ok()) {
    const auto it = failing_.find(server);
    if (it == failing_.end()) return;
    it->second.last_writes <<= 1;
    if ((it->second.last_writes & ((1U << kMany) - 1)) == 0) failing_.erase(it);
  } else if (Counts(status)) {
    Failures& failures = failing_[server];
    failures.last_writes = failures.last_writes << 1 | 1U;
    failures.ill = failures.ill || std::popcount(failures.last_writes) >= kMany;
    failures.last = now;
    failures.why = status;
  }
}

std::string WriteHealth::Illness(const std::function<bool(const std::string& server)>& counts,
                                 Time now) const {
  MutexLock lock(mu_);
  for (const auto& [server, failures] : failing_) {
    if (!failures.ill || now - failures.last >= kForgotten || !counts(server)) continue;
    return "server " + server + " fails writes: " + failures.why.ToString();
  }
  return "";
}

}  // namespace kvstrata
