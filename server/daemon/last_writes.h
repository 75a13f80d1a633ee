// SPDX-License-Identifier: Apache-2.0
// LastWrites: what a clean end still waits for: that chunks and pages which engines have computed
// get to the tiers below. Who writes them is at work all the time (chunk_server.h, tier_row.h).
//
// It waits for chunks in all tiers, and for pages in the disk. It ends when nothing waits, when its
// time is over, when somebody asks, or when no tier takes anything any more. What no tier has then
// is counted and told. Log: event=stop_writes when it begins, event=stop_dropped if something is
// lost.
//
// Ownership: borrows what it is given. Thread-safety: none; one thread waits. Errors: none. Cost: a
// look at the counters every 10 ms.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

#include "server/chunks/chunk_server.h"
#include "server/work/tiers/tier_row.h"

namespace kvstrata {

class LastWrites {
 public:
  // `disk`: null: there is none.
  LastWrites(const ChunkServer* chunks, const TierRow* disk) : chunks_(chunks), disk_(disk) {}

  // Waits for `timeout` at most, and no longer than `patience` while nothing is written. `ends`
  // sleeps for as long as it is told; true: somebody asks for the end.
  // REQUIRES: nobody stores any more.
  void WriteOn(std::chrono::microseconds timeout, std::chrono::microseconds patience,
               const std::function<bool(std::chrono::milliseconds)>& ends) const;

 private:
  struct Amount {
    uint64_t chunks = 0, pages = 0, bytes = 0;
  };
  struct State {
    bool saves = false;  // chunks
    ChunkNumbers chunks;
    TierRowCounters pages;

    bool waits() const { return saves || pages.waiting > 0; }
    // Another one whenever something was summed, written, refused or left.
    uint64_t steps() const;
  };

  State Look() const;
  Amount Waiting(const State& now) const;
  // Why it waits no longer; "": nothing waits.
  std::string_view Await(std::chrono::microseconds timeout, std::chrono::microseconds patience,
                         const std::function<bool(std::chrono::milliseconds)>& ends) const;

  const ChunkServer* const chunks_;
  const TierRow* const disk_;
};

}  // namespace kvstrata
