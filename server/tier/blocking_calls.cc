// SPDX-License-Identifier: Apache-2.0
#include "server/tier/blocking_calls.h"

#include <condition_variable>
#include <utility>

#include "base/sync.h"

namespace kvstrata {

class AwaitedCall::End {
 public:
  void Come() {
    MutexLock lock(mu_);
    came_ = true;
    changed_.notify_one();
  }
  void Wait() KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock lock(mu_.native());
    changed_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return came_; });
  }

 private:
  Mutex mu_;
  std::condition_variable changed_;
  bool came_ KVS_GUARDED_BY(mu_) = false;
};

AwaitedCall::AwaitedCall(TierCall terms) : end_(std::make_shared<End>()), terms_(std::move(terms)) {
  terms_.done = [end = end_] { end->Come(); };
  terms_.waits = true;
}

void AwaitedCall::Wait() { end_->Wait(); }

void ProbeAndWait(ValueTier* tier, std::span<TierProbe> probes, Deadline deadline) {
  AwaitedCall call({deadline, {}, nullptr});
  tier->Probe(probes, call.terms());
  call.Wait();
}

void GetAndWait(ValueTier* tier, std::span<TierGet> gets, Deadline deadline,
                const std::stop_token& cancel) {
  AwaitedCall call({deadline, cancel, nullptr});
  tier->Get(gets, call.terms());
  call.Wait();
}

void PutAndWait(ValueTier* tier, std::span<TierPut> puts, Deadline deadline,
                const std::stop_token& cancel, bool durable) {
  AwaitedCall call({deadline, cancel, nullptr, durable});
  tier->Put(puts, call.terms());
  call.Wait();
}

Status ForgetAndWait(ValueTier* tier, std::span<const std::string> keys, Deadline deadline,
                     bool durable) {
  std::vector<TierForget> forgets;
  for (const std::string& key : keys) forgets.push_back({key, {}, {}});
  return ForgetAndWait(tier, std::span(forgets), deadline, durable);
}

Status ForgetAndWait(ValueTier* tier, std::span<TierForget> forgets, Deadline deadline,
                     bool durable) {
  AwaitedCall call({deadline, {}, nullptr, durable});
  tier->Forget(forgets, call.terms());
  call.Wait();
  for (const TierForget& forget : forgets) KVS_RETURN_IF_ERROR(forget.status);
  return OkStatus();
}

Status WalkOn(ValueTier* tier, TierWalk* walk, Deadline deadline) {
  AwaitedCall call({deadline, {}, nullptr});
  tier->Walk(walk, call.terms());
  call.Wait();
  return walk->status;
}

Status WalkAndWait(ValueTier* tier, Deadline deadline,
                   const std::function<void(const TierValue&)>& visit) {
  for (TierWalk walk; walk.cursor != kWalkEnd;) {
    KVS_RETURN_IF_ERROR(WalkOn(tier, &walk, deadline));
    for (const TierValue& value : walk.values) visit(value);
  }
  return OkStatus();
}

ValueSizes KnownSizes(ValueTier* tier, std::string_view key) {
  TierProbe probe{key, {}};
  tier->Probe({&probe, 1}, {{}, {}, [] {}});
  return probe.sizes;
}

}  // namespace kvstrata
