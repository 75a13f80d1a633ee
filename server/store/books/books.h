// SPDX-License-Identifier: Apache-2.0
// Books: the store's one lock and what it guards: which page lies where, what it is known by, what
// was counted. Data and no rule: owners change them together, under the lock.
//
// Ownership: the store's, for as long as it lives; owners keep a reference. Thread-safety: `memory`
// has locks of its own; all else is guarded by `mu` (store_lock.h).
#ifndef KVSTRATA_SERVER_STORE_BOOKS_BOOKS_H_
#define KVSTRATA_SERVER_STORE_BOOKS_BOOKS_H_

#include <memory>
#include <utility>
#include <vector>

#include "server/store/books/model_table.h"
#include "server/store/options/store_lock.h"
#include "server/store/options/store_options.h"
#include "server/store/pages/artefacts.h"
#include "server/store/pages/page.h"
#include "server/store/pages/page_memory.h"
#include "server/store/pages/prefix_index.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

struct Books {
  Books(const StoreOptions& options, std::vector<StoreDevice> devices,
        std::unique_ptr<MemoryResource> host)
      : memory(std::move(devices), options.device_bytes, std::move(host), options.host_bytes),
        pools(&memory, options.arena_bytes) {
    memory.on_failure = options.on_pool_failure;
  }

  PageMemory memory;
  StoreMutex mu;
  PagePools pools KVS_GUARDED_BY(store_lock);
  PrefixIndex prefix KVS_GUARDED_BY(store_lock);
  Artefacts artefacts KVS_GUARDED_BY(store_lock);
  ModelTable models KVS_GUARDED_BY(store_lock);
  StoreCounters counters KVS_GUARDED_BY(store_lock);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BOOKS_BOOKS_H_
