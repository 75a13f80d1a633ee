// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/raw_pages.h"

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/page_copies.h"

namespace kvstrata {

// Releases a page, and makes the prefix index forget it if nobody else holds it and no pin does.
void RawPages::DropRaw(Page* page) {
  if (page->refs == 1 && page->indexed && !page->pinned) books_.prefix.Erase(page);
  references_.Release(page);
}

uint64_t RawPages::GiveBack(Sequence* s, std::span<const size_t> positions) {
  uint64_t bytes = 0;
  for (const size_t i : positions) {
    bytes += s->pages[i]->bytes;
    DropRaw(s->pages[i]);
    s->pages[i] = nullptr;
  }
  return bytes;
}

// Somebody with the same prefix may have moved these pages already; whether there was one.
bool RawPages::UseHostCopies(Sequence* s, std::vector<size_t>* positions) {
  const auto swap = [this, s](size_t i) KVS_NO_THREAD_SAFETY_ANALYSIS {
    Page* copy = books_.prefix.Find(s->pages[i]->key);
    if (copy == nullptr || copy == s->pages[i] || copy->arena->tier != Tier::kHost) return false;
    references_.RefPage(copy);
    references_.Release(s->pages[i]);
    s->pages[i] = copy;
    return true;
  };
  return std::erase_if(*positions, swap) > 0;
}

// Whether `n` released pages go back instead of to `host`.
bool RawPages::GivesBack(const Sequence& s, size_t n) const {
  if (s.plan.stored.keep_raw != KeepRaw::kAuto) return s.plan.stored.keep_raw == KeepRaw::kNo;
  const auto page_bytes = static_cast<uint64_t>(s.model->desc.geometry.page_bytes());
  return books_.memory.capacity(PoolId::Host()) <
         books_.pools.used(PoolId::Host()) + n * page_bytes;
}

Status RawPages::PlanPlacing(Sequence* s, CopyPlan* plan, uint64_t* bytes) {
  std::vector<size_t> positions = ReleasedPages(*s);
  if (s->plan.stored.keep_raw != KeepRaw::kNo) {
    std::erase_if(positions, [s](size_t i) { return s->pages[i]->arena->tier == Tier::kHost; });
  }
  if (positions.empty()) return OkStatus();
  Session* session = catalog_.SessionOf(s->session);
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * table,
                       tables_.ReserveTable(session, *s, s->table->page_capacity));
  bool changed = s->plan.stored.keep_raw != KeepRaw::kNo && UseHostCopies(s, &positions);
  const auto page_bytes = static_cast<uint64_t>(s->model->desc.geometry.page_bytes());
  std::vector<Page*> taken;
  Status status;
  bool give_back = GivesBack(*s, positions.size());
  if (!give_back && !positions.empty()) {
    status =
        allocator_.Allocate({session->tenant, kDaemon, nullptr, s->model->id, {PoolId::Host()}},
                            page_bytes, static_cast<uint32_t>(positions.size()), &taken);
    give_back = !status.ok() && s->plan.stored.keep_raw == KeepRaw::kAuto;
  }
  if (give_back) {
    *bytes += GiveBack(s, positions);
    changed = true;
    status = OkStatus();
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    PlannedCopy& planned = plan->copies.emplace_back();
    planned.source = s->pages[positions[i]];
    planned.copy = taken[i];
    planned.position = static_cast<uint32_t>(positions[i]);
    planned.keeps_key = true;
  }
  if (!plan->copies.empty()) copies_.Hold(plan, plan->copies);
  if (changed) {
    tables_.Publish(session, s, table);
    references_.Advance(session->tenant);
  } else {
    session->memory->FreeTable(table);
  }
  return status;
}

Status RawPages::PlaceRaw(uint64_t sequence, uint64_t* bytes) {
  CopyPlan plan;
  Geometry geometry;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(sequence));
    geometry = s->model->desc.geometry;
    KVS_RETURN_IF_ERROR(PlanPlacing(s, &plan, bytes));
    if (plan.copies.empty()) return OkStatus();
  }
  KVS_ASSIGN_OR_RETURN(const MoveResult moved, copies_.CopyAndSwapIn(0, sequence, geometry, &plan));
  *bytes += moved.bytes;
  return OkStatus();
}

}  // namespace kvstrata
