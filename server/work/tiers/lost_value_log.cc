// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/lost_value_log.h"

#include "server/store/reports/value_info.h"

namespace kvstrata {

void LostValueLog::Tell(std::string_view key, uint32_t segment, const Status& why, int64_t now_s) {
  uint64_t suppressed = 0;
  {
    MutexLock lock(mu_);
    LogLimiter& limiter = lines_.try_emplace(std::string(why.reason()), kBurst).first->second;
    if (!limiter.Allow(now_s, &suppressed)) return;
  }
  LogEvent(LogLevel::kError, "value_lost",
           {{"key", ValueKeyText(key)},
            {"segment", segment},
            {"reason", why.reason()},
            {"why", why.message()},
            {"suppressed", suppressed}});
}

}  // namespace kvstrata
