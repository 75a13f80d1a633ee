// SPDX-License-Identifier: Apache-2.0
// What an open of a sequence asks for, and what it answers. Plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "server/store/pages/hold_limits.h"

namespace kvstrata {

// When the parts of an open ended, one after the other.
struct OpenTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begun;
  Clock::time_point prepared;   // its plan, parameters, and the keys of its pages
  Clock::time_point loaded;     // what had to come from disk or from another device
  Clock::time_point found;      // the prefix that is held
  Clock::time_point published;  // its pages taken, its first table published
  uint32_t disk_values = 0;     // pages and index blocks that were asked of the disk
};

struct OpenedSequence {
  uint64_t sequence = 0;
  uint32_t slot = 0;
  uint32_t held_tokens = 0;
  uint32_t indexed_tokens = 0;
  uint32_t surprisal_tokens = 0;  // leading ones whose surprisal was stored with held pages
  uint32_t bounded_tokens = 0;    // leading ones of which it is known whether they end a sentence
  Plan plan;
  Geometry geometry;
  std::vector<int32_t> boundary_tokens;  // sentence ends of the model
  std::vector<uint8_t> boundary;         // sentence ends of leading tokens, stored with held pages
  bool imported = false;                 // imports.h
  OpenTimes times;                       // what Openings::OpenSequence took
};

struct OpenOptions {
  HoldLimits hold;
  // Pages and index blocks for so many tokens, the prompt's among them, are taken at open, or it is
  // refused. 0, or fewer than the prompt has: those for the prompt.
  uint32_t reserve_tokens = 0;
  // Finds nothing, and nothing of it is found (MakePrivate): whoever opens it cannot say what its
  // keys and values depend on.
  bool private_pages = false;
};

using OpenDone = std::function<void(const Result<OpenedSequence>&)>;

}  // namespace kvstrata
