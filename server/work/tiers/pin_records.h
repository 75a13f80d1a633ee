// SPDX-License-Identifier: Apache-2.0
// Pins in a tier: a pin is a value of its own, "pin/" and its number as 16 hexadecimal digits, so
// that it is there whole or not at all (docs/disk_format.md, "Pins"). Its time is kept by the clock
// of the machine: it goes on while no daemon runs. Thread-safety: any thread. Blocking: they wait
// for the tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/store/pages/pins.h"
#include "server/store/store.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/tier_row.h"

namespace kvstrata {

// NoteRecords: has a tier's loads read what lies there of artefacts' records when a daemon
// starts, so that look-ups know what they say (server/store/prompts/artefact_ledger.h).
//
// In the background, batches alternating with opens, which it may delay no more than they delay
// each other. What is late or refused is left out: the store knows it once an open reads it.
// Ownership: borrows all; the tier ends its loads before the others end. Cost: a look at each key
// that the tier has, then a small read a record.

// `row` reads `values`. Waits for a walk over the keys. Calls `done` once with the number that was
// read, in the caller's thread or in the tier's.
void NoteRecords(Store* store, ValueTier* values, TierRow* row,
                 std::function<void(size_t records)> done);

std::string PinRecordName(uint64_t pin);

// What is put; aligned for the tier, `keep` owns it.
TierPut EncodePin(const PrefixPin& pin);

// Nothing if it is not one that this version wrote.
std::optional<PrefixPin> DecodePin(std::span<const std::byte> bytes);

// Erases the pin's record; it is gone for good when this returns.
Status ErasePin(ValueTier* tier, uint64_t pin, Deadline deadline);

// All pins there, over or not, by number. Those that cannot be read are left out.
std::vector<PrefixPin> ReadPins(ValueTier* tier, Deadline deadline);

}  // namespace kvstrata
