// SPDX-License-Identifier: Apache-2.0
// SessionTotals: what the sessions of this process told about themselves in their segments, those
// that are gone among it: steps, and what lies in their rings.
//
// Clients write these words and may write anything: a count that shrinks adds nothing, one that
// leaps adds at most kMostAtOnce, so the sums only grow. Thread-safety: any thread; the lock is a
// leaf, taken when a session begins or ends and by who reads the totals. Cost: a few loads for each
// session.
#pragma once

#include <cstdint>

#include "proto/shm_layout.h"

namespace kvstrata {

struct StepTotals {
  uint64_t decoded = 0, in_full = 0;
  uint64_t selected = 0, reused = 0;
  uint64_t request_ring_full = 0;
};

struct RingDepths {
  uint64_t bytes = 0;    // in all sessions' rings together
  uint64_t fullest = 0;  // in the session's that has most
};

struct SessionTotals {
  StepTotals steps;
  RingDepths requests, replies;  // now
};

SessionTotals ReadSessionTotals();

// A session whose words are read. Adds what it has to the totals when it goes.
class CountedSession {
 public:
  static constexpr uint64_t kMostAtOnce = uint64_t{1} << 32;

  // `header` outlives it.
  explicit CountedSession(const shm::SessionHeader* header);
  ~CountedSession();
  CountedSession(const CountedSession&) = delete;
  CountedSession& operator=(const CountedSession&) = delete;

 private:
  friend struct CountedSessions;

  const shm::SessionHeader* const header_;
  StepTotals seen_;  // guarded by the lock of all
};

}  // namespace kvstrata
