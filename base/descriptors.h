// SPDX-License-Identifier: Apache-2.0
// How many file descriptors this process has left, so that some are kept for who must get in when
// others have taken the rest.
//
// Any thread. Cost: two system calls since Linux 6.2; before, a look at each open descriptor.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace kvstrata {

// For operators and for work under way, such as a pool that grows: no connection of another user
// may leave fewer.
inline constexpr uint64_t kDescriptorReserve = 64;

// RLIMIT_NOFILE and how much of it is open; all of it when /proc does not tell.
struct DescriptorUse {
  uint64_t limit = 0, open = 0;
  uint64_t left() const { return limit - (open < limit ? open : limit); }
};
DescriptorUse CountDescriptors();

// RESOURCE_EXHAUSTED DESCRIPTORS when `wanted` more would leave fewer than the reserve.
Status CheckDescriptors(uint64_t wanted);

}  // namespace kvstrata
