// SPDX-License-Identifier: Apache-2.0
// TierHooks: what an engine below a ValueTier offers beyond it, and not every tier has.
//
// They are functions, each of which may be missing, and not a second interface: a tier for the
// cluster, which evicts, persists and pins by rules of its servers, has none of them, and what is
// above has one place for each where it asks. Thread-safety: any thread, with no lock held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct TierHooks {
  // Never evicts values of these keys, there now or later, until as many unpins. RAM only.
  std::function<void(std::span<const std::string> keys)> pin, unpin;
  // Makes the next start quick; the end of a drain. Blocks.
  std::function<Status(Deadline deadline)> checkpoint;
  // Memory that buffers will lie in, which the tier may register and keeps. Blocks.
  std::function<Status(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline)>
      add_memory;
};

}  // namespace kvstrata
