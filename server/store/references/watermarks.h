// SPDX-License-Identifier: Apache-2.0
// Watermarks: how full a pool may get before pages of it are moved or evicted in the background,
// and who is woken when one is fuller (moves.h).
//
// Thread-safety: all methods under the store's lock. Cost: constant for each pool.
#pragma once

#include <cstdint>
#include <functional>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"

namespace kvstrata {

class Watermarks {
 public:
  Watermarks(const StoreSettings& settings, Books& books) : settings_(settings), books_(books) {}

  // Bytes of the pool that may be used: above the high mark it is relieved, down to the low one.
  uint64_t HighMark(PoolId pool) const KVS_REQUIRES(store_lock);
  uint64_t LowMark(PoolId pool) const KVS_REQUIRES(store_lock);

  // Called under the store's lock. Null: nobody moves anything.
  void SetWake(std::function<void()> wake) KVS_REQUIRES(store_lock);
  bool HasWake() const KVS_REQUIRES(store_lock) { return wake_ != nullptr; }
  // REQUIRES: HasWake.
  void Wake() const KVS_REQUIRES(store_lock) { wake_(); }
  // Wakes whoever moves if a pool is above its mark or its capacity; after what may make it so.
  void NoteFill() const KVS_REQUIRES(store_lock);

 private:
  const StoreSettings& settings_ KVS_GUARDED_BY(store_lock);
  Books& books_;
  std::function<void()> wake_ KVS_GUARDED_BY(store_lock);
};

}  // namespace kvstrata
