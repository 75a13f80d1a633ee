// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/sequence_entry.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/check.h"
#include "kernels/plan/plan_needs.h"
#include "server/store/books/books.h"
#include "server/store/pages/hold_limits.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/raw_pages.h"

namespace kvstrata {
namespace {

// Entries of a first table beyond the pages it starts with, so that decoding extends it in place.
constexpr uint32_t kSpareEntries = 16;

uint32_t FirstCapacity(size_t pages) {
  return std::bit_ceil(static_cast<uint32_t>(pages) + kSpareEntries);
}

// A model that names the ids which end sentences needs no reports of them.
uint32_t BoundedTokens(const Sequence& s) {
  if (!s.model->desc.boundary_tokens.empty()) return s.held_tokens;
  const auto known = static_cast<uint32_t>(ReportedPages(s.pages, kNeedBoundary, s.page_tokens()));
  return std::min(known * s.page_tokens(), s.held_tokens);
}

OpenedSequence Describe(const Sequence& s) {
  return {s.id,
          s.slot,
          s.held_tokens,
          s.indexed_tokens,
          s.series.LeadingSurprisals(),
          BoundedTokens(s),
          s.plan,
          s.model->desc.geometry,
          s.model->desc.boundary_tokens,
          s.series.boundary,
          s.imported};
}

}  // namespace

void GivePlaceBack(const SessionCatalog& catalog, Sequence* s) {
  const auto lease = catalog.sequences().find(s->place.lease);
  if (lease == catalog.sequences().end()) return;
  lease->second->place.taken = std::move(s->place.taken);
}

SequenceEntry::SequenceEntry(Books& books, const StoreOptions& options, SessionCatalog& catalog,
                             Tables& tables, PageReferences& references, PageAllocator& allocator,
                             RawPages& raw_pages)
    : books_(books),
      options_(options),
      catalog_(catalog),
      tables_(tables),
      references_(references),
      allocator_(allocator),
      raw_pages_(raw_pages) {}

void SequenceEntry::OpenOnArtefact(Sequence* s, const Opening& o) {
  const Artefact* artefact = books_.artefacts.Find(o.artefact);
  if (artefact == nullptr || !artefact->MappableFrom(o.device)) {
    KVS_CHECK(o.upper.has_value());
    artefact = &*o.upper;
    s->codec->rest_load = o.load;
  }
  s->extents = artefact->extents;
  for (const Extent& extent : s->extents) references_.RefPage(extent.page);
  s->series = artefact->series.Slice(0, s->held_tokens);
  CodecState& codec = *s->codec;
  codec.recompressor = artefact->recompressor;
  codec.released = artefact->released;
  codec.opened_on = artefact->prompt_tokens;
  codec.promised = o.rest;
  ++books_.counters.artefact_hits;
}

Status SequenceEntry::Take(Session* session, Sequence* s, Hit hit, const Opening& o) {
  const uint64_t ahead =
      std::min<uint64_t>(o.tokens + options_.headroom_tokens, kMaxSequenceTokens);
  const uint64_t cover = o.limits.only_held ? 0 : std::max<uint64_t>(ahead, o.reserve_tokens);
  // References first: allocation may evict what nobody uses.
  s->pages.reserve(s->PagesFor(cover));
  references_.RefAll(session, hit.pages, &s->pages);
  references_.RefAll(session, hit.index_blocks, &s->index_blocks);
  const Status status = allocator_.TakeUpTo(session, s, cover);
  if (!status.ok()) {
    references_.ReleaseAll(session, &s->index_blocks);
    references_.ReleaseAll(session, &s->pages);
    references_.ReleaseExtents(&s->extents);
    references_.Advance(session->tenant);
    return status;
  }
  if (s->codec && s->codec->opened_on != 0) {
    books_.counters.released_bytes += raw_pages_.GiveBack(s, ReleasedPages(*s));
  }
  return status;
}

Result<OpenedSequence> SequenceEntry::Enter(Session* session, std::unique_ptr<Sequence> s) {
  Result<UserPlace> place =
      s->place.taken.held()
          ? Result<UserPlace>(std::move(s->place.taken))
          : UserPlace::Take(options_.user_limits, session->tenant->name, Limit::kSequences);
  std::optional<uint32_t> slot;
  const Result<shm::SequenceTable*> table =
      [&]() KVS_REQUIRES(store_lock) -> Result<shm::SequenceTable*> {
    KVS_RETURN_IF_ERROR(place.status());
    slot = session->memory->TakeSlot();
    if (slot) return tables_.ReserveTable(session, *s, FirstCapacity(s->pages.size()));
    return ResourceExhausted(
        "SEQUENCE_LIMIT",
        std::to_string(shm::kMaxSequences) + " sequences are open in this session; close some");
  }();
  if (!table.ok()) {
    if (slot) session->memory->FreeSlot(*slot);
    if (place.ok()) s->place.taken = std::move(*place);
    GivePlaceBack(catalog_, s.get());
    references_.ReleaseExtents(&s->extents);
    references_.ReleaseAll(session, &s->index_blocks);
    references_.ReleaseAll(session, &s->pages);
    references_.Advance(session->tenant);
    return table.status();
  }
  s->place.taken = std::move(*place);
  s->slot = *slot;
  s->id = session->tenant->NextId(&session->tenant->sequences_made);
  s->session = session->id;
  s->opened = Clock::now();
  tables_.Publish(session, s.get(), *table);
  const OpenedSequence opened = Describe(*s);
  session->outside = nullptr;  // the maps have it now
  catalog_.EnterSequence(session, std::move(s));
  return opened;
}

}  // namespace kvstrata
