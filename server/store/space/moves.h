// SPDX-License-Identifier: Apache-2.0
// Moves: pages between the pools. On request (Move); in the background, by server/work/mover.h:
// promotions of what sequences opened on, room below the watermarks (relief.h); and what follows
// when a pool's capacity changes.
//
// Thread-safety: methods that say so are called under the store's lock, all others from any thread.
// Bytes are copied outside of the lock. Cost: of copies; a look at all arenas of a pool.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string_view>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

class Moves {
 public:
  Moves(Books& books, SessionCatalog& catalog, Devices& devices, PageCopies& copies,
        Watermarks& watermarks, Relief& relief)
      : books_(books),
        catalog_(catalog),
        devices_(devices),
        copies_(copies),
        watermarks_(watermarks),
        relief_(relief) {}

  // Copies a sequence's sealed pages to another pool (`device`: that of its session's device),
  // publishes a table that names the copies, and retires the originals nobody else refers to.
  // Readers inside a step keep what they see. SEQUENCE_UNKNOWN, POOL_EXHAUSTED, TABLES_FULL,
  // COPY_FAILED, DEVICE_FAILED.
  Result<MoveResult> Move(uint64_t sequence, Tier to) KVS_EXCLUDES(store_lock);
  // Calls `wake`, under the store's lock, whenever MoveSome may have something to do. Null: nobody
  // moves anything.
  void SetMoveSink(std::function<void()> wake) KVS_EXCLUDES(store_lock);
  // A piece of what is to be moved, at most `bytes` of copies but for a page: of sequences that
  // opened on pages of `host` these, to `device` while it is below its high mark; of a pool that
  // went above its high mark, until its low one, pages that nobody uses: from device to host while
  // that is below its own, else they are evicted. Returns the bytes copied; nothing: there is
  // nothing to do. One thread at a time.
  std::optional<uint64_t> MoveSome(uint64_t bytes) KVS_EXCLUDES(store_lock);
  // Changes the capacity of a pool, of `device` of each device or of the one named, and evicts what
  // nobody uses as far as that empties arenas that are beyond it. INVALID_ARGUMENT POOL_SIZE: 1 MiB
  // to 16 TiB; DEVICE_UNKNOWN. The result is the sum over the pools.
  Result<ResizedPool> ResizePool(Tier tier, uint64_t bytes, std::string_view device = "")
      KVS_EXCLUDES(store_lock);

  // Whether a device pool is above 80 % of its capacity: what releases most should go first.
  bool UnderPressure() const KVS_EXCLUDES(store_lock);

  // Called after a sequence opened.
  void NotePromotion(Session* session, const Sequence& s) KVS_REQUIRES(store_lock);

 private:
  // What Move may copy.
  struct MoveLimit {
    uint64_t bytes = ~uint64_t{0};  // but for its first page
    uint64_t room = ~uint64_t{0};
    bool evicts = true;  // to make room for the copies
  };
  Result<MoveResult> Move(uint64_t sequence, Tier to, MoveLimit limit) KVS_EXCLUDES(store_lock);
  std::optional<uint64_t> PromoteSome(uint64_t bytes) KVS_EXCLUDES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Devices& devices_;
  PageCopies& copies_;
  Watermarks& watermarks_;
  Relief& relief_;
  std::deque<uint64_t> promotions_ KVS_GUARDED_BY(store_lock);  // sequences on pages of host
};

}  // namespace kvstrata
