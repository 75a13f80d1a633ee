// SPDX-License-Identifier: Apache-2.0
#include "server/tier/blocking_calls.h"

#include <condition_variable>
#include <memory>
#include <utility>

#include "base/sync.h"

namespace kvstrata {
namespace {

// Shared with `done`, which may still be leaving it when the caller goes on.
class End {
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

template <typename Start>
void Await(TierCall call, const Start& start) {
  const auto end = std::make_shared<End>();
  call.done = [end] { end->Come(); };
  start(std::move(call));
  end->Wait();
}

}  // namespace

void ProbeAndWait(ValueTier* tier, std::span<TierProbe> probes, Deadline deadline) {
  Await({deadline, {}, nullptr}, [&](TierCall call) { tier->Probe(probes, std::move(call)); });
}

void GetAndWait(ValueTier* tier, std::span<TierGet> gets, Deadline deadline,
                const std::stop_token& cancel) {
  Await({deadline, cancel, nullptr}, [&](TierCall call) { tier->Get(gets, std::move(call)); });
}

void PutAndWait(ValueTier* tier, std::span<TierPut> puts, Deadline deadline,
                const std::stop_token& cancel, bool durable) {
  Await({deadline, cancel, nullptr, durable, true},
        [&](TierCall call) { tier->Put(puts, std::move(call)); });
}

Status ForgetAndWait(ValueTier* tier, std::span<const std::string> keys, Deadline deadline,
                     bool durable) {
  std::vector<TierForget> forgets;
  for (const std::string& key : keys) forgets.push_back({key, {}, {}});
  return ForgetAndWait(tier, std::span(forgets), deadline, durable);
}

Status ForgetAndWait(ValueTier* tier, std::span<TierForget> forgets, Deadline deadline,
                     bool durable) {
  Await({deadline, {}, nullptr, durable, true},
        [&](TierCall call) { tier->Forget(forgets, std::move(call)); });
  for (const TierForget& forget : forgets) KVS_RETURN_IF_ERROR(forget.status);
  return OkStatus();
}

Status WalkOn(ValueTier* tier, TierWalk* walk, Deadline deadline) {
  Await({deadline, {}, nullptr}, [&](TierCall call) { tier->Walk(walk, std::move(call)); });
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
