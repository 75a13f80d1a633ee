// SPDX-License-Identifier: Apache-2.0
// TierScrub: an operator's wish that every value of the tier below be read and checked. Plain
// values.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"

namespace kvstrata {

struct ScrubProgress {
  uint64_t values = 0, bytes = 0;  // read, whether sound or not
  uint64_t corrupt = 0;            // values that were damaged, or unreadable; they have left
  uint64_t late = 0;               // not answered in time; they stay, unchecked
  uint64_t orphans = 0;            // extents of artefacts whose record is gone; erased at the end
};

struct TierScrub {
  uint64_t bytes_per_second = 0;  // 0: as fast as the tier
  // Called after each batch, in the tier's thread; false ends the scrub.
  std::function<bool(const ScrubProgress&)> progress;
  // Called last, exactly once, from the tier's thread. ABORTED SCRUB_CANCELLED; UNAVAILABLE
  // DAEMON_STOPPING, DISK_BREAKER.
  std::function<void(const Status&)> done;
};

}  // namespace kvstrata
