// SPDX-License-Identifier: Apache-2.0
// Calls of a ValueTier that wait for their end. Not from a tier's own thread. Status of each
// request as the tier sets it.
//
//     AwaitedCall put({deadline, cancel});
//     tier->Put(puts, put.terms());
//     put.Wait();
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>

#include "server/tier/value_tier.h"

namespace kvstrata {

// One call, whose caller does nothing until its end.
class AwaitedCall {
 public:
  // `terms`: without `done` and `waits`.
  explicit AwaitedCall(TierCall terms);
  // For the one call to be made.
  const TierCall& terms() const { return terms_; }
  void Wait();

 private:
  class End;
  const std::shared_ptr<End> end_;  // shared with `done`, which may still be leaving it
  TierCall terms_;
};

void ProbeAndWait(ValueTier* tier, std::span<TierProbe> probes, Deadline deadline);
void GetAndWait(ValueTier* tier, std::span<TierGet> gets, Deadline deadline,
                const std::stop_token& cancel = {});
void PutAndWait(ValueTier* tier, std::span<TierPut> puts, Deadline deadline,
                const std::stop_token& cancel = {}, bool durable = false);
// The first status that is not OK, of them all.
Status ForgetAndWait(ValueTier* tier, std::span<TierForget> forgets, Deadline deadline,
                     bool durable = false);
Status ForgetAndWait(ValueTier* tier, std::span<const std::string> keys, Deadline deadline,
                     bool durable = false);
// The next portion; what Walk says.
Status WalkOn(ValueTier* tier, TierWalk* walk, Deadline deadline);
// Calls `visit` for every value.
Status WalkAndWait(ValueTier* tier, Deadline deadline,
                   const std::function<void(const TierValue&)>& visit);

// What this process knows of a key; never waits.
ValueSizes KnownSizes(ValueTier* tier, std::string_view key);

}  // namespace kvstrata
