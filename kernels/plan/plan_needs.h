// SPDX-License-Identifier: Apache-2.0
// What a plan needs of the engine beside keys, values and queries: series, calls, token ids. Its
// selector and its codec declare theirs, beside their factories; nobody else knows.
//
// Threads: constant tables and pure functions; any.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/plan/plan.h"

namespace kvstrata {

// kvs_need's numbers (kvstrata.h).
enum Need : uint32_t {
  kNeedTokenIds = 1,
  kNeedPrefillDone = 2,
  kNeedSurprisal = 4,
  kNeedEntropy = 8,
  kNeedBoundary = 16,
  kNeedPromptQueries = 32,
};

struct NeedText {
  Need need;
  std::string_view name;  // "surprisal"
  std::string_view text;  // what it is of, by which call, and what becomes of the plan without it
};
// All needs, in the order of their numbers.
std::span<const NeedText> NeedTexts();

// A sum of Needs; kNeedTokenIds is always one.
uint32_t NeedsOf(const Plan& plan);

// A line a need: "surprisal: of every prompt token, ...".
std::string DescribeNeeds(uint32_t needs);

}  // namespace kvstrata
