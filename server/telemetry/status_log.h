// SPDX-License-Identifier: Apache-2.0
// StatusLog: warnings of errors that come in numbers, at most one line a second of them all.
// Thread-safety: any thread.
#pragma once

#include <string_view>

#include "base/status.h"
#include "base/sync.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class StatusLog {
 public:
  // Whether a line may be written now; `*suppressed` were not since the last one.
  bool Allow(uint64_t* suppressed) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return limiter_.Allow(suppressed);
  }
  void Warn(std::string_view event, const Status& status) KVS_EXCLUDES(mu_) {
    uint64_t suppressed = 0;
    if (!Allow(&suppressed)) return;
    LogEvent(LogLevel::kWarn, event,
             {{"reason", status.reason()}, {"why", status.message()}, {"suppressed", suppressed}});
  }

 private:
  Mutex mu_;
  LogLimiter limiter_ KVS_GUARDED_BY(mu_){1};
};

}  // namespace kvstrata
