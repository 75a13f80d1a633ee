// SPDX-License-Identifier: Apache-2.0
// Epochs: when may replaced memory be reused? Readers keep the epoch they entered at
// (proto/table_reader.h); the daemon retires what it replaced with the current epoch, increments
// the epoch, and frees an entry once every reader slot that could see it is 0 or greater.
//
// Two scopes, so that a client that parks its readers hurts nobody it shares nothing with: pages
// wait for the sessions of their tenant, tables and access counters for their own session.
// Thread-safety: the store's lock for all of it; reader slots are atomics in shared memory.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <utility>

#include "proto/shm_layout.h"

namespace kvstrata {

inline constexpr uint64_t kNoReader = std::numeric_limits<uint64_t>::max();

// The oldest epoch that a session's readers entered; kNoReader when none is inside a step.
uint64_t OldestReader(const shm::SessionHeader& session);
// Readers inside a step.
uint32_t CountReaders(const shm::SessionHeader& session);

// What was replaced, in the order in which it was.
template <typename T>
class RetireQueue {
 public:
  void Push(uint64_t epoch, T item) { items_.emplace_back(epoch, std::move(item)); }

  // Calls free(item) for what no reader at `oldest` or later can see, at most `most` times; whether
  // there is more. `free` may not push.
  template <typename F>
  bool Reclaim(uint64_t oldest, F&& free, size_t most = ~size_t{0}) {
    const auto passed = [&] { return !items_.empty() && items_.front().first < oldest; };
    for (; passed() && most > 0; --most) {
      free(items_.front().second);
      items_.pop_front();
    }
    return passed();
  }

  const std::deque<std::pair<uint64_t, T>>& items() const { return items_; }

 private:
  std::deque<std::pair<uint64_t, T>> items_;
};

}  // namespace kvstrata
