// SPDX-License-Identifier: Apache-2.0
// NoteRecords: has a tier's loads read what lies there of artefacts' records when a daemon
// starts, so that look-ups know what they say (server/store/prompts/artefact_ledger.h).
//
// In the background, batches alternating with opens, whose time it may take no more than they take
// of each other's. What is late or refused is left out: the store knows it once an open reads it.
// Ownership: borrows all; the tier ends its loads before the others end. Cost: a look at every key
// of the tier, then a small read a record.
#ifndef KVSTRATA_SERVER_WORK_TIERS_TIER_RECORDS_H_
#define KVSTRATA_SERVER_WORK_TIERS_TIER_RECORDS_H_

#include <cstddef>
#include <functional>

#include "server/store/store.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/tier_row.h"

namespace kvstrata {

// `row` reads `values`. Waits for a walk over the keys. Calls `done` once with the number that was
// read, in the caller's thread or in the tier's.
void NoteRecords(Store* store, ValueTier* values, TierRow* row,
                 std::function<void(size_t records)> done);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TIERS_TIER_RECORDS_H_
