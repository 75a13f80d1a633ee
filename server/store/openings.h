// SPDX-License-Identifier: Apache-2.0
// Openings: how a sequence comes to be: its plan, what is held of its prompt, pages for the rest,
// its first table.
//
// Ownership: an Opening belongs to its caller; what its load holds is released when it is
// finished. Thread-safety: methods that say so are called under the store's lock, all others from
// any thread. Cost: hashing the tokens, never under the lock; an open works in pieces
// (long_request.h).
#ifndef KVSTRATA_SERVER_STORE_OPENINGS_H_
#define KVSTRATA_SERVER_STORE_OPENINGS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"
#include "server/store/opening.h"
#include "server/store/parameters.h"
#include "server/store/store_lock.h"

namespace kvstrata {

struct Books;
class Moves;
class PageAllocator;
class PageReferences;
class Plans;
class PrefixLoads;
class RawPages;
class Recompression;
class Replication;
class SessionCatalog;
class Tables;

class Openings {
 public:
  Openings(Books& books, const StoreOptions& options, Plans& plans, SessionCatalog& catalog,
           Tables& tables, PageReferences& references, PageAllocator& allocator, Moves& moves,
           PrefixCatalog& prefixes, PrefixLoads& loads, Replication& replication,
           Recompression& recompression, RawPages& raw_pages);

  // Attaches to the longest held prefix (at most tokens - 1), reserves pages for the rest,
  // publishes the first table. SEQUENCE_LIMIT, TABLES_FULL (RESOURCE_EXHAUSTED), SEQUENCE_TOO_LONG,
  // POOL_EXHAUSTED, PARAMETERS_* (parameters.h), PLAN_COMBINATION of a plan that cannot serve the
  // model.
  Result<OpenedSequence> OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                                      std::span<const int32_t> tokens,
                                      const OpenOptions& options = {}) KVS_EXCLUDES(store_lock);
  // The same, after what the tier below has of the prefix beyond memory was read, what lies on
  // another device copied, and the plan's parameters read: never waits for any of it, calls `done`
  // once, at once in this thread or later in the tier's or the replication queue's. A page that is
  // lost, corrupt or late ends the prefix, and is no error.
  void OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                    std::span<const int32_t> tokens, OpenDone done, const OpenOptions& options = {})
      KVS_EXCLUDES(store_lock);

  // Also ends its load, whatever comes of it. Called once.
  Result<OpenedSequence> FinishOpen(Opening* o) KVS_EXCLUDES(store_lock);
  // Gives a sequence that has its pages a slot, a number and its first table.
  Result<OpenedSequence> Enter(Session* session, std::unique_ptr<Sequence> s)
      KVS_REQUIRES(store_lock);

 private:
  // What needs no lock: checks, the codec, the keys.
  Result<Opening> PrepareOpen(uint64_t session, uint64_t model, std::string_view plan,
                              std::span<const int32_t> tokens, const OpenOptions& options,
                              Files files) KVS_EXCLUDES(store_lock);
  void GoOnOpening(Result<Opening> prepared, const OpenDone& done) KVS_EXCLUDES(store_lock);
  // Reads what of it the tier has, then finishes it.
  void LoadAndFinish(const std::shared_ptr<Opening>& o, PageTier* tier, const OpenDone& done)
      KVS_EXCLUDES(store_lock);
  void ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done)
      KVS_EXCLUDES(store_lock);
  // Tells a remote tier that a prefix was found again.
  void OfferReused(const Opening& o, const IndexLayout& index, const OpenedSequence& opened)
      KVS_EXCLUDES(store_lock);
  Result<OpenedSequence> FinishOpenUnderLock(Opening* o) KVS_EXCLUDES(store_lock);
  Result<OpenedSequence> FinishOpenLocked(Session* session, Opening* o) KVS_REQUIRES(store_lock);
  // Cuts a hit to the pages that o.limits allow and that only the hit can tell.
  void LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const KVS_REQUIRES(store_lock);
  // Fills `s`, which is nobody's yet, with the hit and new pages up to `cover` tokens.
  Status TakeForOpen(Session* session, Sequence* s, Hit hit, uint64_t cover)
      KVS_REQUIRES(store_lock);
  // A lease that promised this open counts no more while the sequence does.
  static void TakeLeasedPlace(const Tenant& tenant, Opening* o, Sequence* s)
      KVS_REQUIRES(store_lock);
  // When an artefact of this prompt may be had at its end, nothing is due before.
  void AwaitArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(store_lock);
  // Gives a sequence that is held without its raw pages the artefact at once.
  void OpenOnArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  Plans& plans_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageAllocator& allocator_;
  Moves& moves_;
  PrefixCatalog& prefixes_;
  PrefixLoads& loads_;
  Replication& replication_;
  Recompression& recompression_;
  RawPages& raw_pages_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_OPENINGS_H_
