// SPDX-License-Identifier: Apache-2.0
#include "server/attach/attach_state.h"

#include <chrono>

namespace kvstrata {

bool AttachState::MayLog(uint64_t* suppressed) {
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
      std::chrono::steady_clock::now().time_since_epoch());
  return limiter.Allow(now.count(), suppressed);
}

}  // namespace kvstrata
