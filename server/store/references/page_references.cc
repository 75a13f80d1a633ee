// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/page_references.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "server/store/books/books.h"
#include "server/store/books/sequence.h"

namespace kvstrata {
namespace {}  // namespace

uint64_t PageHolds::Begin() {
  const uint64_t hold = next_++;
  holds_[hold];
  return hold;
}

void PageHolds::Keep(uint64_t hold, Page* page) {
  references_.Keep(page);
  holds_.at(hold).kept.push_back(page);
}

uint64_t PageHolds::Keep(Page* page) {
  const uint64_t hold = Begin();
  Keep(hold, page);
  return hold;
}

void PageHolds::Refer(uint64_t hold, Page* page) {
  references_.RefPage(page);
  TakeOver(hold, page);
}

void PageHolds::TakeOver(uint64_t hold, Page* page) { holds_.at(hold).referred.push_back(page); }

void PageHolds::HandOver(uint64_t hold, Page* page) {
  std::vector<Page*>& referred = holds_.at(hold).referred;
  const auto at = std::ranges::find(referred, page);
  KVS_CHECK(at != referred.end());
  referred.erase(at);
}

void PageHolds::End(uint64_t id, Session* session) {
  const auto found = holds_.find(id);
  if (id == 0) return;
  KVS_CHECK(found != holds_.end());
  Hold& hold = found->second;  // stays where it is, while others are let in
  references_.ReleaseAll(session, &hold.referred);
  for (size_t ended = 1; !hold.kept.empty(); ++ended) {
    Page* const page = hold.kept.back();
    hold.kept.pop_back();
    references_.EndKeep(page);
    if (ended % kPiecePages == 0) mu_.Yield();
  }
  holds_.erase(id);
}

void PageReferences::RefAll(Session* session, std::span<Page* const> from, std::vector<Page*>* to) {
  to->reserve(from.size());
  for (Page* page : from) {
    if (page != nullptr) RefPage(page);
    to->push_back(page);
    catalog_.LetOthersIn(session, 1);
  }
}

void PageReferences::RefPage(Page* page) {
  if (page->refs == 0 && page->indexed) books_.prefix.MarkUsed(page);
  books_.pools.Ref(page);
}

void PageReferences::Release(Page* page) {
  books_.pools.Unref(page);
  if (page->refs > 0) return;
  if (page->indexed) {
    books_.prefix.MarkCached(page);
  } else {
    Retire(page);
  }
}

void PageReferences::ReleaseAll(Session* session, std::vector<Page*>* pages) {
  for (; !pages->empty(); catalog_.LetOthersIn(session, 1)) {
    if (pages->back() != nullptr) Release(pages->back());
    pages->pop_back();
  }
}

void PageReferences::ReleaseExtents(std::vector<Extent>* extents) {
  for (; !extents->empty(); extents->pop_back()) Release(extents->back().page);
}

void PageReferences::ReleaseArtefact(Artefact artefact) {
  if (artefact.extents.empty()) return;
  Tenant* tenant = catalog_.tenant(artefact.extents.front().page->arena->tenant);
  for (const Extent& extent : artefact.extents) --extent.page->artefacts;
  ReleaseExtents(&artefact.extents);
  Advance(tenant);
  ReclaimLocked();
}

void PageReferences::Retire(Page* page) {
  books_.pools.Retire(page);
  Tenant* tenant = catalog_.tenant(page->arena->tenant);
  tenant->retired.Push(tenant->epoch, page);
}

void PageReferences::Keep(Page* page) { ++page->keeps; }

void PageReferences::EndKeep(Page* page) {
  if (--page->keeps == 0 && parked_.erase(page) != 0) FreePages({&page, 1});
}

void PageReferences::FreePages(std::span<Page* const> pages) {
  for (const Page* page : pages) books_.models.NoteFreed(page->model);
  books_.pools.Free(pages);
}

// What was retired so far stays until every reader that is inside a step now has left it.
void PageReferences::Advance(Tenant* tenant) {
  ++tenant->epoch;
  for (Session* session : tenant->sessions) {
    session->memory->tables()->global_epoch.store(tenant->epoch, std::memory_order_seq_cst);
  }
}

void PageReferences::ReclaimLocked() {
  for (Tenant* tenant : catalog_.tenants()) ReclaimLocked(tenant);
}

void PageReferences::ReclaimByPieces(Tenant* tenant) {
  while (ReclaimLocked(tenant, kReclaimPages)) books_.mu.Yield();
}

bool PageReferences::ReclaimLocked(Tenant* tenant, size_t most) {
  uint64_t oldest = kNoReader;
  for (Session* session : tenant->sessions) {
    const uint64_t own = OldestReader(*session->memory->header());
    oldest = std::min(oldest, own);
    SessionMemory* memory = session->memory.get();
    session->retired_tables.Reclaim(own, [&](shm::SequenceTable* t) { memory->FreeTable(t); });
    session->retired_counters.Reclaim(
        own, [&](AccessCounters access_counters) { memory->FreeCounters(access_counters); });
  }
  std::vector<Page*> passed;
  const auto free = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (page->keeps == 0) return passed.push_back(page);
    parked_.insert(page);
  };
  const bool more = tenant->retired.Reclaim(oldest, free, most);
  FreePages(passed);
  return more;
}

void PageReferences::DropLost() {
  for (const PoolId pool : books_.memory.ids()) DropLost(pool);
}

void PageReferences::DropLost(PoolId pool) {
  bool& dropped = dropped_[pool.index()];
  if (dropped || books_.memory.failure(pool).ok()) return;
  dropped = true;
  for (Page* page : books_.prefix.PagesIn(pool)) {
    books_.prefix.Erase(page);
    if (page->refs == 0) Retire(page);
  }
  const auto lies_there = [pool](const Artefact& a) {
    return std::ranges::any_of(a.extents,
                               [pool](const Extent& e) { return e.page->arena->pool == pool; });
  };
  while (std::optional<Artefact> artefact = books_.artefacts.EvictOldest(lies_there)) {
    ReleaseArtefact(std::move(*artefact));
  }
  for (Tenant* tenant : catalog_.tenants()) Advance(tenant);
  ReclaimLocked();
}

void PageReferences::Reclaim() {
  StoreLock lock(books_.mu);
  DropLost();
  for (uint32_t i = 0; i < catalog_.tenants().size(); ++i) ReclaimByPieces(catalog_.tenant(i));
}

}  // namespace kvstrata
