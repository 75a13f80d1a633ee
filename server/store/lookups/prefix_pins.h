// SPDX-License-Identifier: Apache-2.0
// PrefixPins: prefixes that eviction spares (pins.h): made, listed, ended, restored.
//
// Ownership: pins are the daemon's. Thread-safety: all methods, from any thread; the tier below is
// told outside of the lock. Cost: a look-up for each page; what makes or ends a pin waits for the
// disk, where there is one.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_tier.h"
#include "server/store/pages/pins.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

class PrefixPins {
 public:
  PrefixPins(Books& books, const StoreOptions& options, SessionCatalog& catalog,
             PrefixCatalog& prefixes, Lookups& lookups);

  // Pins its leading full pages, their index, and its artefact with the pages that that needs, now.
  // Errors of all: INVALID_ARGUMENT PIN_TTL (1 ms to 366 days); RESOURCE_EXHAUSTED PIN_LIMIT, where
  // what pins share counts for each; those of the tier below, which leave nothing pinned.
  // SEQUENCE_UNKNOWN, FAILED_PRECONDITION PIN_NOTHING.
  Result<PinInfo> PinSequence(uint64_t sequence, std::chrono::microseconds ttl)
      KVS_EXCLUDES(store_lock);
  // Pins the leading whole pages of `tokens` that are held, in whatever tier; not the index.
  // NOT_FOUND PIN_MISS, MODEL_UNKNOWN.
  Result<PinInfo> PinPrefix(std::string_view tenant, uint64_t model,
                            std::span<const int32_t> tokens, std::chrono::microseconds ttl)
      KVS_EXCLUDES(store_lock);
  // NOT_FOUND PIN_UNKNOWN; those of the tier below: the pin has ended, and may be back after a
  // restart.
  Status RemovePin(uint64_t pin) KVS_EXCLUDES(store_lock);
  // Ends those whose time is over. For housekeeping; no I/O.
  void ExpirePins() KVS_EXCLUDES(store_lock);
  // Pins of an earlier daemon, which the tier keeps already.
  void RestorePins(std::vector<PrefixPin> pins) KVS_EXCLUDES(store_lock);
  // All pins, by number.
  std::vector<PinInfo> Pins() KVS_EXCLUDES(store_lock);
  PinLimits PinUse() const KVS_EXCLUDES(store_lock);

  const std::map<uint64_t, PrefixPin>& all() const KVS_REQUIRES(store_lock) { return pins_; }

 private:
  uint64_t PinLimit() const KVS_REQUIRES(store_lock);
  uint64_t PinnedBytes() const KVS_REQUIRES(store_lock);
  void EnterPin(PrefixPin pin) KVS_REQUIRES(store_lock);
  PrefixPin TakePin(std::map<uint64_t, PrefixPin>::iterator at) KVS_REQUIRES(store_lock);
  // `offers`: what it keeps, for a remote tier.
  Result<PinInfo> AddPin(PrefixPin pin, std::span<const TierOffer> offers,
                         std::chrono::microseconds ttl) KVS_EXCLUDES(store_lock);
  PinInfo InfoOf(const PrefixPin& pin) KVS_EXCLUDES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  const StoreSettings& settings_ KVS_GUARDED_BY(store_lock);
  SessionCatalog& catalog_;
  PrefixCatalog& prefixes_;
  Lookups& lookups_;
  std::map<uint64_t, PrefixPin> pins_ KVS_GUARDED_BY(store_lock);
  uint64_t next_pin_ KVS_GUARDED_BY(store_lock) = 1;
};

}  // namespace kvstrata
