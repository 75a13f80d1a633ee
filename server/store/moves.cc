// SPDX-License-Identifier: Apache-2.0
#include "server/store/moves.h"

#include "server/store/books.h"
#include "server/store/devices.h"
#include "server/store/eviction.h"
#include "server/store/long_request.h"
#include "server/store/page_allocator.h"
#include "server/store/page_copies.h"
#include "server/store/page_holds.h"
#include "server/store/page_references.h"
#include "server/store/sequence.h"
#include "server/store/session_catalog.h"
#include "server/store/taker.h"
#include "server/store/watermarks.h"

namespace kvstrata {

Moves::Moves(Books& books, SessionCatalog& catalog, Devices& devices, PageReferences& references,
             PageHolds& holds, PageAllocator& allocator, Eviction& eviction, PageCopies& copies,
             Watermarks& watermarks)
    : books_(books),
      catalog_(catalog),
      devices_(devices),
      references_(references),
      holds_(holds),
      allocator_(allocator),
      eviction_(eviction),
      copies_(copies),
      watermarks_(watermarks) {}

Result<MoveResult> Moves::Move(uint64_t sequence, Tier to) {
  return Move(sequence, to, MoveLimit());
}

Result<MoveResult> Moves::Move(uint64_t sequence, Tier to, MoveLimit limit) {
  CopyPlan plan;
  Geometry geometry;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(sequence));
    KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
    Session* const session = catalog_.SessionOf(s->session);
    const LongRequest request(&catalog_, session);
    const PoolId pool = PoolsOf(*session, to).front();
    if (!books_.memory.failure(pool).ok()) return books_.memory.failure(pool);
    Tenant* tenant = session->tenant;
    geometry = s->model->desc.geometry;
    uint64_t bytes = 0;
    for (size_t i = 0; i < s->pages.size(); ++i) {
      catalog_.LetOthersIn(session, 1);
      Page* page = s->pages[i];
      if (page == nullptr || !page->sealed || page->arena->tier == to) continue;
      bytes += page->bytes;
      if (bytes > limit.room || (bytes > limit.bytes && !plan.copies.empty())) break;
      PlannedCopy& planned = plan.copies.emplace_back();
      planned.source = page;
      planned.position = static_cast<uint32_t>(i);
      planned.keeps_key = true;
    }
    if (plan.copies.empty()) return MoveResult{0, 0, s->version};
    // The daemon's own arenas take them: no session writes there.
    const Taker taker{tenant, kDaemon, nullptr, s->model->id, {pool}, limit.evicts};
    KVS_RETURN_IF_ERROR(copies_.TakeCopies(session, taker, &plan));
  }
  const Result<MoveResult> moved = copies_.CopyAndSwapIn(0, sequence, geometry, &plan);
  if (!moved.ok()) return moved;
  StoreLock lock(books_.mu);
  (to == Tier::kDevice ? books_.counters.promoted_bytes : books_.counters.demoted_bytes) +=
      moved->bytes;
  return moved;
}

}  // namespace kvstrata
