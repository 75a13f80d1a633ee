// SPDX-License-Identifier: Apache-2.0
#include "server/work/write_health.h"

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
    failing_.erase(server);
  } else if (Counts(status)) {
    Failures& failures = failing_[server];
    ++failures.in_a_row;
    failures.last = now;
    failures.why = status;
  }
}

std::string WriteHealth::Illness(const std::function<bool(const std::string& server)>& counts,
                                 Time now) const {
  MutexLock lock(mu_);
  for (const auto& [server, failures] : failing_) {
    if (failures.in_a_row < kInARow || now - failures.last >= kForgotten || !counts(server)) {
      continue;
    }
    return "server " + server + " fails every write: " + failures.why.ToString();
  }
  return "";
}

}  // namespace kvstrata
