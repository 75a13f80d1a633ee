// SPDX-License-Identifier: Apache-2.0
#include "tests/fakes/far_tier.h"

#include <utility>

#include "server/tier/blocking_calls.h"

namespace kvstrata::testing {
namespace {

void Refuse(std::span<TierProbe> probes, const Status&) {
  for (TierProbe& probe : probes) probe.sizes = {};
}
template <typename Request>
void Refuse(std::span<Request> requests, const Status& why) {
  for (Request& request : requests) request.status = why;
}

}  // namespace

FarTier::FarTier(ValueTier* shared) : shared_(shared) {
  for (size_t i = 0; i <= kLanes; ++i) {
    threads_.emplace_back([this] {
      while (std::optional<CallQueue::Task> task = queue_.Next()) queue_.Run(std::move(*task));
    });
  }
}

FarTier::~FarTier() {
  Release();
  queue_.Stop();
  for (std::thread& thread : threads_) thread.join();
}

void FarTier::Hold(bool* what) {
  const std::lock_guard lock(mu_);
  *what = true;
}

void FarTier::Release() {
  const std::lock_guard lock(mu_);
  probes_held_ = gets_held_ = puts_held_ = false;
  in_use_.clear();
  released_.notify_all();
}

void FarTier::Lose(const std::string& key) {
  const std::lock_guard lock(mu_);
  lost_.insert(key);
}

size_t FarTier::kept() const {
  const std::lock_guard lock(mu_);
  return in_use_.size();
}

Status FarTier::Arrive(const bool* held, const TierCall& call) {
  std::unique_lock lock(mu_);
  const Deadline after = std::chrono::steady_clock::now() + delay_.load();
  (void)released_.wait_until(lock, call.cancel, std::min(after, call.deadline),
                             [] { return false; });
  (void)released_.wait_until(lock, call.cancel, call.deadline, [&] { return !*held; });
  return WhyNotNow(call);
}

template <typename Request>
void FarTier::Add(Lane lane, std::span<Request> requests, TierCall call,
                  std::function<void(const TierCall&)> run) {
  queue_.Add(lane, {std::move(call), std::move(run),
                    [requests](const Status& why) { Refuse(requests, why); }});
}

void FarTier::Probe(std::span<TierProbe> probes, TierCall call) {
  if (call.deadline <= std::chrono::steady_clock::now()) {
    Refuse(probes, TierLate());
    return call.done();
  }
  ++probes_;
  probed_ += probes.size();
  Add(kProbes, probes, std::move(call), [this, probes](const TierCall& terms) {
    const Status status = Arrive(&probes_held_, terms);
    for (TierProbe& probe : probes) {
      const std::string key = std::string(probe.place) + std::string(probe.key);
      probe.sizes = status.ok() ? KnownSizes(shared_, key) : ValueSizes();
      const uint64_t lie = lie_;
      if (status.ok() && lie != 0) probe.sizes = ValueSizes(std::span(&lie, 1));
    }
  });
}

void FarTier::Get(std::span<TierGet> gets, TierCall call) {
  {
    const std::lock_guard lock(mu_);
    if (gets_held_) {
      for (const TierGet& get : gets) in_use_.push_back(get.keep);
    }
  }
  Add(kGets, gets, std::move(call), [this, gets](const TierCall& terms) {
    const Status status = Arrive(&gets_held_, terms);
    for (TierGet& get : gets) {
      get.status = status;
      if (!status.ok()) continue;
      {
        const std::lock_guard lock(mu_);
        if (lost_.contains(get.key)) get.status = NotFound("TIER_MISS", "it was lost");
      }
      if (!get.status.ok()) continue;
      TierGet inner = get;
      inner.key = get.place + get.key;
      GetAndWait(shared_, {&inner, 1}, terms.deadline);
      get.status = inner.status;
    }
  });
}

void FarTier::Put(std::span<TierPut> puts, TierCall call) {
  Add(kPuts, puts, std::move(call), [this, puts](const TierCall& terms) {
    const Status status = Arrive(&puts_held_, terms);
    for (TierPut& put : puts) {
      put.status = status;
      if (!status.ok()) continue;
      TierPut inner = put;
      inner.key = put.place + put.key;
      PutAndWait(shared_, {&inner, 1}, terms.deadline);
      put.status = inner.status;
    }
  });
}

void FarTier::Forget(std::span<TierForget> keys, TierCall call) {
  Add(kPuts, keys, std::move(call), [this, keys](const TierCall& terms) {
    const Status status = Arrive(&puts_held_, terms);
    for (TierForget& forget : keys) {
      const std::string key = forget.place + forget.key;
      forget.status =
          status.ok() ? ForgetAndWait(shared_, std::span(&key, 1), terms.deadline) : status;
    }
  });
}

void FarTier::Walk(TierWalk* walk, TierCall call) { shared_->Walk(walk, std::move(call)); }

}  // namespace kvstrata::testing
