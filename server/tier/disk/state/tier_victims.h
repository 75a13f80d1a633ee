// SPDX-License-Identifier: Apache-2.0
// TierVictims: which values may leave so that another finds room, by a clock hand for each size of
// a slot, and which must stay because of a pin. RAM only; under the tier's lock.
#ifndef KVSTRATA_SERVER_TIER_DISK_STATE_TIER_VICTIMS_H_
#define KVSTRATA_SERVER_TIER_DISK_STATE_TIER_VICTIMS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class TierVictims {
 public:
  explicit TierVictims(TierState* state) : state_(state) {}

  // DiskTier::Victims.
  std::vector<std::string> Choose(std::span<const uint64_t> sizes) KVS_EXCLUDES(state_->mu);
  void Pin(std::span<const std::string> keys) KVS_EXCLUDES(state_->mu);
  void Unpin(std::span<const std::string> keys) KVS_EXCLUDES(state_->mu);

 private:
  TierState* const state_;
  std::map<uint32_t, uint64_t> hands_ KVS_GUARDED_BY(state_->mu);  // by blocks of a slot
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_STATE_TIER_VICTIMS_H_
