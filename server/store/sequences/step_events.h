// SPDX-License-Identifier: Apache-2.0
// StepEvents: what a running sequence sends: grow before a step that needs more, commit after it,
// reports, the end of its prompt.
//
// Thread-safety: methods that say so are called under the store's lock, all others from any thread.
// Cost: a commit hashes the tokens of pages that are full now, without the lock; what grows with
// the tokens works in pieces (books.h), reports of 4096 positions. Errors: SESSION_UNKNOWN,
// SEQUENCE_UNKNOWN (also a sequence of another session), DEVICE_FAILED, and those that a method
// names.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/pages/series.h"

namespace kvstrata {

class StepEvents {
 public:
  StepEvents(Books& books, const StoreOptions& options, SessionCatalog& catalog, Devices& devices,
             Tables& tables, PageReferences& references, PageAllocator& allocator,
             PageCopies& copies, PrefixCatalog& prefixes, Recompression& recompression,
             CodecExtents& extents, RecallAudits& recalls)
      : books_(books),
        options_(options),
        catalog_(catalog),
        devices_(devices),
        tables_(tables),
        references_(references),
        allocator_(allocator),
        copies_(copies),
        prefixes_(prefixes),
        recompression_(recompression),
        extents_(extents),
        recalls_(recalls) {}

  // Makes the table cover `tokens`, with private pages from position `writable` on and private
  // index blocks from `index_writable` on; publishes before it returns. SEQUENCE_TOO_LONG,
  // POOL_EXHAUSTED; GROW_SEALED when `writable` lies in a page that is full.
  Status Grow(uint64_t session, uint64_t sequence, uint32_t tokens, uint32_t writable,
              uint32_t index_writable) KVS_EXCLUDES(store_lock);
  // New tokens are in the pages of all layers. Seals full pages, keys them, extends the table ahead
  // of need (without pages left it does not: the next Grow says POOL_EXHAUSTED).
  // COMMIT_OUT_OF_ORDER when `first` is not the sequence's length; COMMIT_BEYOND_TABLE,
  // COMMIT_TO_SHARED, COMMIT_INDEX when the client wrote, or says it wrote, where it may not;
  // SEQUENCE_IMPORTED, as Grow and ForkSequence, unless the daemon wrote the rows of an imported
  // one.
  Status Commit(uint64_t session, uint64_t sequence, uint32_t first,
                std::span<const int32_t> tokens, uint32_t indexed_tokens, bool by_daemon = false)
      KVS_EXCLUDES(store_lock);
  // Any array may be null. REPORT_POSITION, REPORT_VALUE.
  Status Report(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n,
                const float* surprisal, const float* entropy, const uint8_t* boundary)
      KVS_EXCLUDES(store_lock);
  Status PrefillDone(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);

  // Pages and a table for so many tokens.
  Status ExtendLocked(Session* session, Sequence* s, uint64_t tokens) KVS_REQUIRES(store_lock);

 private:
  CopyPlan PlanPrivateCopies(Session* session, const Sequence& s, uint32_t writable,
                             uint32_t index_writable, bool* stale_flags) const
      KVS_REQUIRES(store_lock);
  void KeepSeries(const Sequence& s, Page* page, size_t n, Series series) KVS_REQUIRES(store_lock);
  void KeepSeriesWithPages(Session* session, Sequence* s, uint32_t first, uint32_t end)
      KVS_REQUIRES(store_lock);
  void SealIndex(Session* session, Sequence* s, uint32_t indexed_tokens) KVS_REQUIRES(store_lock);
  static Status CheckPromised(const Sequence& s, std::span<const int32_t> tokens);
  Status CheckCommit(Session* session, const Sequence& s, uint32_t first,
                     std::span<const int32_t> tokens, uint32_t indexed_tokens) const
      KVS_REQUIRES(store_lock);
  // Seals the pages that are full now, which get `keys`.
  void CommitLocked(Session* session, Sequence* s, std::span<const PageKey> keys,
                    std::span<const int32_t> tokens, uint32_t indexed_tokens)
      KVS_REQUIRES(store_lock);
  // The piece [done, done + some) of a report of n positions from `first`.
  Status ReportSome(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n, uint32_t done,
                    uint32_t some, const Series& piece) KVS_EXCLUDES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  SessionCatalog& catalog_;
  Devices& devices_;
  Tables& tables_;
  PageReferences& references_;
  PageAllocator& allocator_;
  PageCopies& copies_;
  PrefixCatalog& prefixes_;
  Recompression& recompression_;
  CodecExtents& extents_;
  RecallAudits& recalls_;
};

}  // namespace kvstrata
