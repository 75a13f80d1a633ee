// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/page_allocator.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/store/books/sequence.h"
#include "server/store/references/eviction.h"
#include "server/store/references/page_references.h"
#include "server/store/references/watermarks.h"
#include "server/store/space/capacity_counter.h"

namespace kvstrata {
namespace {

constexpr uint64_t kEvictPages = 2048;  // at most ahead of need: each time looks for what may go

std::string MiBText(uint64_t bytes) {
  const uint64_t tenths = bytes * 10 / (uint64_t{1} << 20);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

}  // namespace

PageAllocator::PageAllocator(const std::shared_ptr<UserLimits>& user_limits, Books& books,
                             SessionCatalog& catalog, PageReferences& references,
                             CapacityCounter& capacity, Eviction& eviction, Watermarks& watermarks)
    : user_limits_(user_limits),
      books_(books),
      catalog_(catalog),
      references_(references),
      capacity_(capacity),
      eviction_(eviction),
      watermarks_(watermarks) {
  // Called by books_.pools alone, hence under the lock.
  books_.pools.on_drop = [this](const Arena& arena) KVS_NO_THREAD_SAFETY_ANALYSIS {
    Tenant* const tenant = catalog_.tenant(arena.tenant);
    for (Session* s : tenant->sessions) s->granted.erase(arena.id);
    user_limits_->Give(tenant->user, LimitOf(arena.pool), arena.memory.bytes);
  };
}

uint32_t PageAllocator::AllocateSome(const Taker& taker, uint64_t bytes, uint32_t n,
                                     std::vector<Page*>* out) {
  const size_t before = out->size();
  uint32_t got = 0;
  for (const PoolId pool : taker.pools) {
    if (got < n) got += AllocateIn(taker, pool, bytes, n - got, out);
  }
  for (size_t i = before; i < out->size(); ++i) (*out)[i]->model = taker.model;
  books_.models.NotePages(taker.model, got);
  watermarks_.NoteFill();
  return got;
}

Status PageAllocator::Exhausted(const Taker& taker, const Shortage& shortage) const {
  UserLimits::User* const user = taker.tenant->user;
  std::string state, limits;
  for (const PoolId pool : taker.pools) {
    if (AtLimit(taker, pool, shortage.bytes)) {
      limits += (limits.empty() ? "" : ",") + std::string(" ") + std::string(NameOf(LimitOf(pool)));
      state += "; " + user_limits_->Describe(user, LimitOf(pool));
      continue;
    }
    state += "; pool '" + books_.memory.NameOfPool(pool) + "' has " +
             MiBText(books_.pools.taken(pool)) + " of " + MiBText(books_.memory.capacity(pool)) +
             " taken by arenas, which sessions hold whole" +
             (books_.memory.failure(pool).ok() ? "" : ", and its device is lost");
  }
  // A request is counted once, and what the daemon does on its own never.
  if (!limits.empty() && taker.session != nullptr) user_limits_->CountRefused(user);
  std::string next = "; ";
  if (shortage.fits) {
    next += std::to_string(*shortage.fits) + " tokens of this model fit now: ask for no more, or ";
  }
  next += limits.empty()
              ? "close sequences or enlarge the pools"
              : "close sequences, or have an operator raise (kvstrata quota set):" + limits;
  return ResourceExhausted("POOL_EXHAUSTED",
                           std::to_string(shortage.pages) + " pages of " +
                               std::to_string(shortage.bytes) + " bytes are needed, " +
                               std::to_string(shortage.got) + " could be had" + state + next);
}

Status PageAllocator::Allocate(const Taker& taker, uint64_t bytes, uint32_t n,
                               std::vector<Page*>* out) {
  const size_t before = out->size();
  const uint32_t got = AllocateSome(taker, bytes, n, out);
  if (got == n) return OkStatus();
  references_.FreePages(std::span<Page* const>(*out).subspan(before));
  out->resize(before);
  return Exhausted(taker, {bytes, n, got, {}});
}

uint32_t PageAllocator::TakeByPieces(Session* session, Taker taker, uint64_t bytes, uint32_t n,
                                     std::vector<Page*>* out) {
  const size_t before = out->size();
  out->reserve(before + n);
  uint32_t got = 0;
  for (uint32_t some = 0; got < n; got += some) {
    const uint32_t wanted = std::min(n - got, kPiecePages);
    taker.ahead = bytes * std::min<uint64_t>(n - got - wanted, kEvictPages);
    some = AllocateSome(taker, bytes, wanted, out);
    for (Page* page : std::span<Page* const>(*out).last(some)) references_.RefPage(page);
    if (some < wanted) {
      Untake(session, out, before);
      return got + some;
    }
    catalog_.LetOthersIn(session, some);
  }
  return got;
}

void PageAllocator::Untake(Session* session, std::vector<Page*>* pages, size_t left) {
  while (pages->size() > left) {
    const size_t some = std::min<size_t>(pages->size() - left, kPiecePages);
    const std::span<Page* const> last = std::span<Page* const>(*pages).last(some);
    for (Page* page : last) books_.pools.Unref(page);
    references_.FreePages(last);
    pages->resize(pages->size() - some);
    catalog_.LetOthersIn(session, some);
  }
}

Status PageAllocator::TakeUpTo(Session* session, Sequence* s, uint64_t tokens) {
  struct Kind {
    uint64_t bytes;
    size_t had, wanted;
    std::vector<Page*>* pages;
    uint32_t missing() const { return static_cast<uint32_t>(wanted - std::min(wanted, had)); }
  };
  std::array<Kind, 2> kinds{{{static_cast<uint64_t>(s->model->desc.geometry.page_bytes()),
                              s->pages.size(), s->PagesFor(tokens), &s->pages},
                             {static_cast<uint64_t>(s->index.block_bytes), s->index_blocks.size(),
                              s->BlocksFor(tokens), &s->index_blocks}}};
  // The larger first: what is left between others is large enough for the smaller.
  if (kinds[1].bytes > kinds[0].bytes) std::swap(kinds[0], kinds[1]);
  const Taker taker = TakerOf(*session, *s);
  for (const Kind& kind : kinds) {
    const uint32_t got = TakeByPieces(session, taker, kind.bytes, kind.missing(), kind.pages);
    if (got == kind.missing()) continue;
    for (const Kind& taken : kinds) Untake(session, taken.pages, taken.had);
    return Exhausted(taker, {kind.bytes, kind.missing(), got, capacity_.TokensThatFit(taker, *s)});
  }
  return OkStatus();
}

bool PageAllocator::AtLimit(const Taker& taker, PoolId pool, uint64_t bytes) const {
  return capacity_.RoomOf(taker, pool) < bytes;
}

bool PageAllocator::AddArena(const Taker& taker, PoolId pool, uint64_t bytes) {
  const uint64_t size = books_.pools.AddArena(pool, taker.tenant->id, taker.writer, bytes,
                                              capacity_.RoomOf(taker, pool));
  user_limits_->Note(taker.tenant->user, LimitOf(pool), size);
  return size != 0;
}

uint32_t PageAllocator::AllocateIn(const Taker& taker, PoolId pool, uint64_t bytes, uint32_t n,
                                   std::vector<Page*>* out) {
  uint32_t got = 0;
  if (!books_.memory.failure(pool).ok()) return got;
  const auto take = [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    got += books_.pools.Take(pool, taker.tenant->id, taker.writer, bytes, n - got, out);
  };
  take();
  // What this tenant has retired, as far as that helps; of all others before anything is dropped.
  for (bool more = true; got < n && more; take())
    more = references_.ReclaimLocked(taker.tenant, PageReferences::kReclaimPages);
  bool reclaimed = false;
  const auto may_adopt = [&](const Arena& arena) { return MayAdopt(taker, arena); };
  while (got < n && books_.pools.Adopt(pool, taker.tenant->id, taker.writer, bytes, may_adopt))
    take();
  const auto may_drop = [this](const Arena& arena)
                            KVS_NO_THREAD_SAFETY_ANALYSIS { return !catalog_.Fenced(arena); };
  while (got < n) {
    if (!AddArena(taker, pool, bytes)) {
      if (!std::exchange(reclaimed, true)) references_.ReclaimLocked();
      if (!books_.pools.DropEmpty(pool, may_drop)) {
        if (!taker.evicts) break;
        const uint64_t room = bytes * (n - got) + taker.ahead;
        const Tenant* const own = AtLimit(taker, pool, bytes) ? taker.tenant : nullptr;
        if (!eviction_.EvictFor(taker, pool, room, AtLimit(taker, pool, room)) &&
            !eviction_.EvictArtefact(pool, own))
          break;
      }
    }
    take();
  }
  return got;
}

}  // namespace kvstrata
