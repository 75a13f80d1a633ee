// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/write_queue.h"

#include <algorithm>
#include <utility>

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTaken = 256;                       // offers of each kind in one go
constexpr std::chrono::milliseconds kLookAgain{50};  // at what was put back

}  // namespace

WriteQueue::WriteQueue(const WriteQueueOptions& options, const KnownKeys* known)
    : options_(options), policy_(options.write, known), tenant_rates_(options.tenant_rates) {}

void WriteQueue::Configure(const WriteQueueOptions& options) {
  policy_.Set(options.write);
  MutexLock lock(mu_);
  tenant_rates_.Set(options.tenant_rates);
}

// What was reported of positions goes where the page went before.
bool WritePolicy::Wants(const TierOffer& offer) const {
  const TierWrite policy = write_;
  if (policy == TierWrite::kOff) return false;
  if (policy == TierWrite::kSealed) {
    return offer.why != OfferedFor::kReused && offer.why != OfferedFor::kPinned;
  }
  if (offer.place == PageKey{}) return false;
  const bool known = known_ != nullptr && known_->present.Contains(offer.key);
  switch (offer.why) {
    case OfferedFor::kLoaded:
      return false;
    case OfferedFor::kSealed:
      return policy == TierWrite::kAll && !known;
    case OfferedFor::kReported:
      return policy == TierWrite::kAll || known;
    case OfferedFor::kArtefact:
      return true;
    case OfferedFor::kReused:
    case OfferedFor::kPinned:
      return !known;
  }
  return false;
}

void WriteQueue::Offer(const TierOffer& offer) {
  if (!policy_.Wants(offer)) return;
  {
    MutexLock lock(mu_);
    if (keys_.contains(offer.key)) return;
    if (drain_.state != Draining::kNo) {
      ++counters_.refused;
      return;
    }
    if (stopping_) {
      ++counters_.dropped_stop;
      return;
    }
    if (keys_.size() >= options_.queue ||
        counters_.waiting_bytes + offer.bytes > options_.queue_bytes) {
      ++counters_.dropped_full;
      return;
    }
    const Clock::time_point now = Clock::now();
    if (!tenant_rates_.Take(offer.tenant, offer.bytes, now)) {
      ++counters_.dropped_rate;
      return;
    }
    keys_.insert(offer.key);
    counters_.waiting_bytes += offer.bytes;
    offers_.push_back({offer.key, offer.place, offer.bytes, offer.why, now});
  }
  changed_.notify_one();
}

// --- the thread that writes ----------------------------------------------------------------------

std::optional<std::vector<WriteQueue::Offered>> WriteQueue::Take() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::optional<std::vector<Offered>> {
    const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return stopping_ || !offers_.empty() || drain_.DryIf(keys_.empty());
    };
    if (put_back_.empty()) {
      changed_.wait(lock, ready);
    } else {
      (void)changed_.wait_for(lock, kLookAgain, ready);
    }
    if (!stopping_) return TakeSome();
    counters_.dropped_stop += keys_.size();
    counters_.waiting_bytes = 0;
    keys_.clear();
    offers_.clear();
    put_back_.clear();
    return std::nullopt;
  }();
}

std::vector<WriteQueue::Offered> WriteQueue::TakeSome() {
  std::vector<Offered> taken;
  for (std::deque<Offered>* const from : {&put_back_, &offers_}) {
    for (size_t n = std::min(from->size(), kTaken); n > 0; --n) {
      keys_.erase(from->front().key);
      ++taken_;
      taken_bytes_ += from->front().bytes;
      taken.push_back(from->front());
      from->pop_front();
    }
  }
  return taken;
}

// Offered again meanwhile, it waits in that place.
void WriteQueue::PutBack(const Offered& offered) {
  MutexLock lock(mu_);
  --taken_;
  taken_bytes_ -= offered.bytes;
  if (keys_.insert(offered.key).second) {
    put_back_.push_back(offered);
  } else {
    counters_.waiting_bytes -= offered.bytes;
  }
}

void WriteQueue::NoteWritten() {
  MutexLock lock(mu_);
  counters_.waiting_bytes -= std::exchange(taken_bytes_, 0);
  taken_ = 0;
}

// --- stops ---------------------------------------------------------------------------------------

bool WriteQueue::Stop() {
  {
    MutexLock lock(mu_);
    if (std::exchange(stopping_, true)) return false;
  }
  changed_.notify_all();
  return true;
}

bool WriteQueue::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

bool WriteQueue::Pace(Deadline begin) {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto stops = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_; };
  return !changed_.wait_until(lock, begin, stops);
}

void WriteQueue::NoteDropped(uint64_t by_stop) {
  MutexLock lock(mu_);
  counters_.dropped_stop += by_stop;
}

// --- drains --------------------------------------------------------------------------------------

Status WriteQueue::Drain() {
  {
    MutexLock lock(mu_);
    if (drain_.state == Draining::kDrained) return OkStatus();
    if (drain_.state == Draining::kFailed && !drain_.failed.ok()) {
      return std::exchange(drain_.failed, OkStatus());
    }
    drain_.state = Draining::kDrying;
  }
  changed_.notify_one();
  return OkStatus();
}

bool WriteQueue::Resume() {
  MutexLock lock(mu_);
  return std::exchange(drain_.state, Draining::kNo) != Draining::kNo;
}

bool WriteQueue::draining() const {
  MutexLock lock(mu_);
  return drain_.state != Draining::kNo;
}

bool WriteQueue::drained() const {
  MutexLock lock(mu_);
  return drain_.state == Draining::kDrained;
}

bool WriteQueue::dry() const {
  MutexLock lock(mu_);
  return drain_.DryIf(keys_.empty());
}

// Resumed, and perhaps begun again, meanwhile: what was offered in between comes first.
void WriteQueue::NoteCheckpoint(const Status& status) {
  MutexLock lock(mu_);
  if (!drain_.DryIf(keys_.empty())) return;
  drain_.state = status.ok() ? Draining::kDrained : Draining::kFailed;
  drain_.failed = status;
}

WriteQueueCounters WriteQueue::counters() const {
  MutexLock lock(mu_);
  WriteQueueCounters all = counters_;
  all.waiting = keys_.size() + taken_;
  all.over_write_rates = tenant_rates_.refused();
  return all;
}

}  // namespace kvstrata
