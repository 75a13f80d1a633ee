// SPDX-License-Identifier: Apache-2.0
// OpeningEnds: the end of an opening, when all that could come has come: what is held of its prompt
// is found once more, under the lock, and the sequence enters with it.
//
// Thread-safety: Finish from any thread. Cost: an open works in pieces (books.h).
#pragma once

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/prompts/opening.h"

namespace kvstrata {

class OpeningEnds {
 public:
  OpeningEnds(Books& books, SessionCatalog& catalog, PageReferences& references,
              PrefixCatalog& prefixes, PrefixLoads& loads, Moves& moves,
              Recompression& recompression, SequenceEntry& entry)
      : books_(books),
        catalog_(catalog),
        references_(references),
        prefixes_(prefixes),
        loads_(loads),
        moves_(moves),
        recompression_(recompression),
        entry_(entry) {}

  // Also ends its load, whatever comes of it, unless it says that it `awaits_rest` (rest_loads.cc).
  // Called once. SESSION_UNKNOWN, and as Openings.
  Result<OpenedSequence> Finish(Opening* o) KVS_EXCLUDES(store_lock);

 private:
  // Tells a remote tier that a prefix was found again.
  void OfferReused(const Opening& o, const IndexLayout& index, const OpenedSequence& opened)
      KVS_EXCLUDES(store_lock);
  Result<OpenedSequence> FinishUnderLock(Opening* o) KVS_EXCLUDES(store_lock);
  Result<OpenedSequence> FinishLocked(Session* session, Opening* o) KVS_REQUIRES(store_lock);
  // Cuts a hit to the pages that o.limits allow and that only the hit can tell.
  void LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const KVS_REQUIRES(store_lock);
  // A lease that promised this open counts no more while the sequence does.
  static void TakeLeasedPlace(const Tenant& tenant, Opening* o, Sequence* s)
      KVS_REQUIRES(store_lock);
  // When an artefact of this prompt may be had at its end, nothing is due before.
  void AwaitArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  PrefixCatalog& prefixes_;
  PrefixLoads& loads_;
  Moves& moves_;
  Recompression& recompression_;
  SequenceEntry& entry_;
};

}  // namespace kvstrata
