// SPDX-License-Identifier: Apache-2.0
// Refusals: what clients were told instead of an answer, counted by reason and told in the log
// ("refused"), at most kRefusalBurst lines in kRefusalWindow of each reason: an engine that asks
// again and again pushes nothing else out of the last events.
//
// Reasons are those of the table (proto/reasons.h); one that it does not have is counted with
// "other", so that no peer can add labels. Thread-safety: any thread. Cost: a look-up in the table
// and an increment; a short lock where a line is written.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvstrata {

// Whom a refusal was for; 0: not known.
struct Refused {
  std::string_view call;  // "Control/OpenSequence"; of a linked client "ring"
  uint32_t uid = 0;
  uint32_t pid = 0;
  uint64_t session = 0;
  std::string_view request;  // what was asked for, without contents
};

inline constexpr uint32_t kRefusalBurst = 5;
inline constexpr std::chrono::seconds kRefusalWindow{10};

// Counts it, and no more: the caller has an event of its own.
void CountRefusal(std::string_view reason);
void NoteRefusal(const Status& why, const Refused& who);

// Every reason that a daemon can say, by name, with how often it did; "other" last.
std::vector<std::pair<std::string_view, uint64_t>> Refusals();

}  // namespace kvstrata
