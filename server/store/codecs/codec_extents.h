// SPDX-License-Identifier: Apache-2.0
// CodecExtents: what codecs made. Their drafts, on their way into pages of the daemon's own; all
// extents of a whole prompt, as an artefact (artefacts.h) for the next sequence with the same one.
//
// Ownership: a hold refers to fresh pages until DropFresh; whoever publishes them takes references
// of its own. An artefact has one reference to each of its extents. Thread-safety: methods that say
// so are called under the store's lock, all others without it, from any thread. Cost: of copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/codec/codec.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/artefacts.h"
#include "server/store/pages/page_memory.h"
#include "server/store/pages/page_tier.h"

namespace kvstrata {

// Pages for drafts, in their order.
struct FreshPages {
  uint64_t hold = 0;
  std::vector<Page*> pages;
};

class CodecExtents {
 public:
  CodecExtents(Books& books, SessionCatalog& catalog, Tables& tables, PageReferences& references,
               PageHolds& holds, PageAllocator& allocator, PrefixCatalog& prefixes,
               RawPages& raw_pages);

  // Pages for the drafts that are not kept, or none: POOL_EXHAUSTED.
  Status TakeExtents(const Sequence& s, const RecompressOutput& output, FreshPages* fresh)
      KVS_REQUIRES(store_lock);
  // `packed_by`: the device in whose memory drafts lie that the host cannot read. COPY_FAILED,
  // DEVICE_FAILED.
  Status CopyDrafts(const RecompressOutput& output, const FreshPages& fresh, PoolId packed_by);
  // Makes the drafts, and the extents that they keep, the sequence's, with `next` as its
  // Recompressor, gives up raw pages as its plan says, and publishes its table. TABLES_FULL.
  Status Swap(Sequence* s, const RecompressOutput& output, FreshPages* fresh,
              std::unique_ptr<Recompressor> next, RecompressResult* result)
      KVS_REQUIRES(store_lock);
  // Releases them, but for those that somebody has referred to meanwhile.
  void DropFresh(FreshPages* fresh) KVS_REQUIRES(store_lock);
  // The same where no table names what is released.
  void Discard(FreshPages* fresh) KVS_REQUIRES(store_lock);
  // Describes an extent's bytes that lie in `page`; null where the host can read them there.
  std::shared_ptr<const std::vector<std::byte>> DescriptionFor(
      const Page& page, std::span<const std::byte> extent) const;

  // --- whole prompts ---
  // Takes references of its own to the extents.
  void EnterArtefact(Artefact artefact) KVS_REQUIRES(store_lock);
  // Enters what the sequence's codec made of its prompt, and offers it.
  void KeepArtefact(const Sequence& s) KVS_REQUIRES(store_lock);
  // Offers one that memory has to the tier below.
  void OfferArtefact(const PageKey& key, OfferedFor why) KVS_REQUIRES(store_lock);
  // For a sequence that opened on every other extent of the artefact: it gets all. TABLES_FULL.
  Status TakeRest(Session* session, Sequence* s, const Artefact& artefact) KVS_REQUIRES(store_lock);
  // That it will not get them, which its steps answer from now on.
  void LoseRest(Session* session, Sequence* s, const Status& why) KVS_REQUIRES(store_lock);
  // The end of a prompt: if its artefact is there, the sequence gets all of it.
  void AttachArtefact(Session* session, Sequence* s) KVS_REQUIRES(store_lock);

 private:
  Books& books_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageHolds& holds_;
  PageAllocator& allocator_;
  PrefixCatalog& prefixes_;
  RawPages& raw_pages_;
};

}  // namespace kvstrata
