// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/refusals.h"

#include <atomic>

#include "base/sync.h"
#include "proto/reasons.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

// One behind the table's is "other".
struct RefusalCounts {
  std::vector<std::atomic<uint64_t>> of =
      std::vector<std::atomic<uint64_t>>(AllReasons().size() + 1);
  Mutex mu;
  std::vector<LogLimiter> lines KVS_GUARDED_BY(mu) =
      std::vector<LogLimiter>(AllReasons().size() + 1, LogLimiter(kRefusalBurst));
};

RefusalCounts& AllRefusals() {
  static RefusalCounts* const counts = new RefusalCounts;
  return *counts;
}

size_t PlaceOf(std::string_view reason) { return FindReason(reason).value_or(AllReasons().size()); }

int64_t Window() { return std::chrono::steady_clock::now().time_since_epoch() / kRefusalWindow; }

// What somebody should look at, not what a caller got wrong.
bool IsServersFault(Code code) {
  return code == Code::kResourceExhausted || code == Code::kUnavailable ||
         code == Code::kInternal || code == Code::kDataLoss || code == Code::kDeadlineExceeded ||
         code == Code::kPermissionDenied || code == Code::kUnauthenticated;
}

}  // namespace

void CountRefusal(std::string_view reason) {
  AllRefusals().of[PlaceOf(reason)].fetch_add(1, std::memory_order_relaxed);
}

void NoteRefusal(const Status& why, const Refused& who) {
  const size_t place = PlaceOf(why.reason());
  RefusalCounts& all = AllRefusals();
  all.of[place].fetch_add(1, std::memory_order_relaxed);
  uint64_t suppressed = 0;
  {
    MutexLock lock(all.mu);
    if (!all.lines[place].Allow(Window(), &suppressed)) return;
  }
  LogEvent(IsServersFault(why.code()) ? LogLevel::kWarn : LogLevel::kInfo, "refused",
           {{"reason", why.reason()},
            {"call", who.call},
            {"uid", who.uid},
            {"pid", who.pid},
            {"session", who.session},
            {"request", who.request},
            {"why", why.message()},
            {"suppressed", suppressed}});
}

std::vector<std::pair<std::string_view, uint64_t>> Refusals() {
  std::vector<std::pair<std::string_view, uint64_t>> out;
  const auto reasons = AllReasons();
  for (size_t i = 0; i <= reasons.size(); ++i) {
    const uint64_t n = AllRefusals().of[i].load(std::memory_order_relaxed);
    if (i == reasons.size()) {
      out.emplace_back("other", n);
    } else if (SaidByDaemon(reasons[i].area) || n != 0) {
      out.emplace_back(reasons[i].name, n);
    }
  }
  return out;
}

}  // namespace kvstrata
