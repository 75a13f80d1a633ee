// SPDX-License-Identifier: Apache-2.0
// Housekeeping: what the attach loop sees to at every tick for nobody in particular: memory that
// may be reclaimed, pins and leases that run out, descriptors that do not close. Housekeeping of
// the store runs in another thread, one pass at a time. Thread-safety: the loop's.
#ifndef KVSTRATA_SERVER_ATTACH_HOUSEKEEPING_H_
#define KVSTRATA_SERVER_ATTACH_HOUSEKEEPING_H_

#include <atomic>
#include <cstddef>

#include "server/attach/attach_state.h"

namespace kvstrata {

class Housekeeping {
 public:
  explicit Housekeeping(AttachState* state) : state_(state) {}

  // Has descriptors closed that wait for it; an event tells of those that do not close.
  void TickCloser();
  // Begins a pass over the store, unless one is under way.
  void KeepHouse();

 private:
  AttachState* const state_;
  std::atomic<bool> under_way_{false};  // a pass over the store
  size_t late_closings_ = 0;            // that were told
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_HOUSEKEEPING_H_
