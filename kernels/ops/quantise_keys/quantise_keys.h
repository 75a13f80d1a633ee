// SPDX-License-Identifier: Apache-2.0
// Op quantise_keys: the keys of one group of tokens of one (layer, KV head) in few bits
// (docs/spec/bits.md 2).
//
// Minimum and step of each channel are rounded outwards, so that every key lies between the least
// and the largest quantised value, and differs from its own by at most half a step. The arithmetic
// is fp32, each operation rounded once, in an order that the page fixes: ref, simd and cuda agree
// bit for bit, and a group's bytes are a function of its keys alone.
//
// Work items are independent. Cost: reads each key once from memory, and again from the cache. No
// allocation.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/quantised_group.h"

namespace kvstrata {

struct QuantiseKeysWork {
  PagedRows keys;            // after rotary embedding; keys.dim is format.dim
  int32_t begin = 0;         // the group is the positions [begin, begin + format.tokens)
  QuantisedGroup format;     // REQUIRES: IsValid()
  std::byte* out = nullptr;  // [format.bytes()], aligned to 4; all of it is written
};

void QuantiseKeysRef(const QuantiseKeysWork* work, int64_t n, Executor& executor);
void QuantiseKeysSimd(const QuantiseKeysWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
