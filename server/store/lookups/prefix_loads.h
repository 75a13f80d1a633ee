// SPDX-License-Identifier: Apache-2.0
// PrefixLoads: what a sequence that opens gets from the tiers below: pages and index blocks of its
// prefix, its prompt's artefact. What the local tier has is known here; a remote one is searched
// first, once, where much is missing. What it says is a plan: what does not come ends the prefix.
//
// Bytes are copied outside of the lock, into pages that the opening's load holds. An artefact comes
// whole or not at all: it is entered when its record and every extent came and were verified, else
// what came of it is let go and the prompt is recompressed. Where the plan's codec can wait for the
// second of every two extents (Codec::rest_waits) the open goes on without them, on Opening::upper;
// pages for them are taken before.
// Thread-safety: methods that say so are called under the store's lock, all others without it, from
// any thread. Cost: of copies; the tier reads.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_tier.h"

namespace kvstrata {

class PrefixLoads {
 public:
  PrefixLoads(Books& books, ArtefactLedger& ledger, SessionCatalog& catalog,
              PageReferences& references, PageHolds& holds, PageAllocator& allocator,
              PrefixCatalog& prefixes, CodecExtents& extents)
      : books_(books),
        ledger_(ledger),
        catalog_(catalog),
        references_(references),
        holds_(holds),
        allocator_(allocator),
        prefixes_(prefixes),
        extents_(extents) {}

  // Asks a remote tier, if there is one and it is worth it, what it has of what is missing, then
  // calls `then`.
  void SearchRemote(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(store_lock);
  // Reads what is missing of the prefix, then calls `then`.
  void LoadPrefix(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(store_lock);
  // Reads the prompt's artefact into memory if only the tier has it, then calls `then`.
  void LoadArtefact(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(store_lock);

  // The prompt's artefact as the opening has it: in memory, else what of it came; null: none.
  const Artefact* ArtefactOf(const Opening& o) const KVS_REQUIRES(store_lock);
  // Reads what `o->upper` lacks to `o->extents`, then calls `done`. False: it is not called.
  bool LoadRest(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> done)
      KVS_EXCLUDES(store_lock);
  // Enters what a tier had, unless somebody was faster. `stored`: the local tier has it.
  void EnterLoaded(const Artefact& artefact, bool stored) KVS_REQUIRES(store_lock);

  // A reference of the load's own, until EndLoad.
  void HoldForLoad(Opening* o, Page* page) KVS_REQUIRES(store_lock);
  // `session`: whose long request this is; null: nobody's.
  void EndLoad(Session* session, Opening* o) KVS_REQUIRES(store_lock);

 private:
  // Holds what memory has of the prefix until EndLoad; the keys that are to be read of it.
  std::vector<PageKey> BeginLoad(Opening* o) KVS_EXCLUDES(store_lock);
  // A page for each value that can be used, else null; `*more`: a prefix without gaps goes on.
  std::vector<Page*> TakeForLoad(Opening* o, size_t first, std::span<const LoadedValue> values,
                                 bool* more) KVS_REQUIRES(store_lock);
  bool TakeLoaded(Opening* o, PageTier* tier, size_t first, std::span<const LoadedValue> values,
                  std::span<const PageKey> keys) KVS_EXCLUDES(store_lock);
  // Asked before its record is read, and behind it.
  bool WantsArtefact(const Opening& o, const PageTier& tier) KVS_EXCLUDES(store_lock);
  void LoadExtents(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(store_lock);
  bool OpensBeforeRest(const Opening& o) const;
  // Extents of the record, a few of them. `longer`: as TierLoad's, from now on.
  struct Part {
    size_t first, step;
    std::chrono::seconds longer;
  };
  // False: `done` is not called.
  bool ReadExtents(const std::shared_ptr<Opening>& o, PageTier* tier, const Part& part,
                   std::function<void()> done) KVS_EXCLUDES(store_lock);
  // Held by the load; null: there is no room.
  Page* TakeExtentPage(Opening* o, size_t i) KVS_EXCLUDES(store_lock);
  bool TakeExtent(Opening* o, size_t i, const LoadedValue& value) KVS_EXCLUDES(store_lock);
  // All came that was asked for.
  void EnterLoadedArtefact(Opening* o, const PageTier& tier) KVS_EXCLUDES(store_lock);

  Books& books_;
  ArtefactLedger& ledger_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  PageHolds& holds_;
  PageAllocator& allocator_;
  PrefixCatalog& prefixes_;
  CodecExtents& extents_;
};

}  // namespace kvstrata
