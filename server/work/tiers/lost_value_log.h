// SPDX-License-Identifier: Apache-2.0
// LostValueLog: the event "value_lost" of each value that left the disk because it could not be
// read or failed its check, at most kBurst lines a second of each reason: a broken segment has
// thousands of values, and would push everything else out of the last events.
//
// Thread-safety: any thread. Cost: a short lock, and a line where one is written.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/sync.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class LostValueLog {
 public:
  static constexpr uint32_t kBurst = 2;

  // now_s: seconds of a clock that only grows. `key` is shown as hexadecimal digits.
  void Tell(std::string_view key, uint32_t segment, const Status& why, int64_t now_s)
      KVS_EXCLUDES(mu_);

 private:
  Mutex mu_;
  std::map<std::string, LogLimiter, std::less<>> lines_ KVS_GUARDED_BY(mu_);  // by reason
};

}  // namespace kvstrata
