// SPDX-License-Identifier: Apache-2.0
#include "server/store/reports/session_totals.h"

#include <algorithm>
#include <set>

#include "base/sync.h"

namespace kvstrata {
namespace {

void AddNew(const std::atomic<uint64_t>& word, uint64_t* seen, uint64_t* total) {
  const uint64_t now = word.load(std::memory_order_relaxed);
  if (now > *seen) *total += std::min(now - *seen, CountedSession::kMostAtOnce);
  *seen = now;
}

void AddDepth(const shm::RingControl& ring, uint64_t capacity, RingDepths* to) {
  const uint64_t head = ring.head.load(std::memory_order_relaxed);
  const uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  const uint64_t depth = tail > head ? std::min(tail - head, capacity) : 0;
  to->bytes += depth;
  to->fullest = std::max(to->fullest, depth);
}

}  // namespace

struct CountedSessions {
  Mutex mu;
  std::set<CountedSession*> live KVS_GUARDED_BY(mu);
  StepTotals totals KVS_GUARDED_BY(mu);

  void Look(CountedSession* session) KVS_REQUIRES(mu) {
    const shm::StepCounts& words = session->header_->steps;
    StepTotals& seen = session->seen_;
    AddNew(words.decoded, &seen.decoded, &totals.decoded);
    AddNew(words.in_full, &seen.in_full, &totals.in_full);
    AddNew(words.selected, &seen.selected, &totals.selected);
    AddNew(words.reused, &seen.reused, &totals.reused);
    AddNew(words.ring_full, &seen.request_ring_full, &totals.request_ring_full);
  }
  void Add(CountedSession* session) KVS_EXCLUDES(mu) {
    MutexLock lock(mu);
    live.insert(session);
  }
  void Remove(CountedSession* session) KVS_EXCLUDES(mu) {
    MutexLock lock(mu);
    Look(session);
    live.erase(session);
  }
  SessionTotals Read() KVS_EXCLUDES(mu) {
    MutexLock lock(mu);
    SessionTotals out;
    for (CountedSession* session : live) {
      Look(session);
      AddDepth(session->header_->request, shm::kRequestRingBytes, &out.requests);
      AddDepth(session->header_->reply, shm::kReplyRingBytes, &out.replies);
    }
    out.steps = totals;
    return out;
  }
};

namespace {

CountedSessions& All() {
  static CountedSessions* const all = new CountedSessions;
  return *all;
}

}  // namespace

SessionTotals ReadSessionTotals() { return All().Read(); }

CountedSession::CountedSession(const shm::SessionHeader* header) : header_(header) {
  All().Add(this);
}

CountedSession::~CountedSession() { All().Remove(this); }

}  // namespace kvstrata
