// SPDX-License-Identifier: Apache-2.0
// Capacity: how much of a model a session could have now. TokenFit: how many tokens of a model, and
// of a plan's index beside them, fit in some memory.
//
// Values and pure functions; any thread. Cost: TokenFit bisects, some 40 additions.
#pragma once

#include <cstdint>
#include <limits>

#include "server/store/options/store_fwd.h"

namespace kvstrata {

inline constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

constexpr uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

// Bytes that pages can be made of, and tokens whose rows and index they hold.
struct Room {
  uint64_t tokens = 0, bytes = 0;
};

struct PoolCapacity {
  Room free;            // at once
  Room after_eviction;  // with what nobody uses dropped; `free` is a part of it
  Room limit;           // what the user's own limit leaves for more arenas; kUnlimited: it has none
};

struct Capacity {
  PoolCapacity device, host;
  // Tokens of the longest prompt that an open would take now, in both pools, if none of it were
  // held.
  uint32_t open_tokens = 0;
};

// How many pages the same memory holds, and how many index blocks.
struct Slots {
  uint64_t pages = 0, blocks = 0;
  Slots& operator+=(const Slots& other) {
    pages += other.pages;
    blocks += other.blocks;
    return *this;
  }
};

class TokenFit {
 public:
  explicit TokenFit(const Sequence& s);

  // As an arena counts them; block_bytes 0: the plan has no index.
  uint64_t page_bytes() const { return page_bytes_; }
  uint64_t block_bytes() const { return block_bytes_; }
  // How many tokens fit in all, in memory for so many more pages or blocks than `had_pages` and
  // `had_blocks`, taken as TakeUpTo takes them: the larger ones first.
  uint64_t Tokens(const Slots& slots, uint64_t had_pages = 0, uint64_t had_blocks = 0) const;

 private:
  // Pages that are fewer for so many index blocks.
  uint64_t PagesFor(uint64_t blocks) const;

  uint64_t page_tokens_ = 0, page_bytes_ = 0;
  uint64_t block_tokens_ = 0, block_bytes_ = 0;
};

}  // namespace kvstrata
