// SPDX-License-Identifier: Apache-2.0
// ValueReads: the read path. A value's header and payload are read together, and nothing of it
// counts unless both are what the index says; one that fails a check leaves the index, and its slot
// is overwritten later.
#ifndef KVSTRATA_SERVER_TIER_DISK_VALUE_READS_H_
#define KVSTRATA_SERVER_TIER_DISK_VALUE_READS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class ValueReads {
 public:
  ValueReads(TierState* state, TierFiles* files) : state_(state), files_(files) {}

  // DiskTier::Get. Holds the reader's side.
  void Get(std::span<TierGet> requests, Deadline deadline, const std::stop_token& cancel)
      KVS_EXCLUDES(state_->mu);

 private:
  struct PlannedGet {
    TierGet* request = nullptr;
    SlotId at;
    Place place;
    uint64_t generation = 0;
  };

  std::vector<PlannedGet> PlanGets(std::span<TierGet> requests) KVS_EXCLUDES(state_->mu);
  Transfer TransferOf(const PlannedGet& get) KVS_EXCLUDES(state_->mu);
  Status FinishGet(const PlannedGet& get, std::byte* scratch, const IoOutcome& outcome)
      KVS_EXCLUDES(state_->mu);
  // Forgets the value at `at` if it is still that one, and has its slot overwritten later.
  Status Lose(const PlannedGet& get, bool reuse, Status why) KVS_EXCLUDES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_VALUE_READS_H_
