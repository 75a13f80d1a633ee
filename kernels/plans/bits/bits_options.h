// SPDX-License-Identifier: Apache-2.0
// Options of selector `bits` (docs/spec/bits.md), in tokens but for `bits` and `max_missed`. Tokens
// of a group are `unit` of IndexOptions. Rows: bits.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct BitsOptions {
  int32_t bits = 2;                               // bits of a channel's code
  int32_t sinks = 4, recent = 64, budget = 2048;  // per KV head
  // Tokens that are chosen together, by the sum of their votes (docs/spec/bits.md 7).
  int32_t run = 1;
  // The share of attention that a KV head may leave out, mean over its query heads: as many tokens
  // are chosen as that takes, at most `budget`. 0: always `budget`.
  double max_missed = 0;

  bool operator==(const BitsOptions&) const = default;
};

}  // namespace kvstrata
