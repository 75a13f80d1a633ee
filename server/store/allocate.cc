// Pages in and out. On a shortage, in this order: what is retired and passed by all readers, orphan
// arenas, new arenas, cached prefix pages nobody uses (oldest first), artefacts nobody uses, the
// next pool; else POOL_EXHAUSTED, with nothing taken.
#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "server/store/long_request.h"

namespace kvstrata {
namespace {

constexpr size_t kReclaimPages = 1024;  // cheaper than others, and each piece looks at all readers
constexpr uint64_t kEvictPages = 2048;  // at most ahead of need: each time looks for what may go

}  // namespace

Store::Impl::Taker Store::Impl::TakerOf(const Session& session, const Sequence& s) const {
  std::vector<PoolId> pools = PoolsOf(session, Tier::kDevice);
  if (s.imported || s.plan.tier == TierKind::kHost) std::ranges::reverse(pools);
  if (s.imported) return {session.tenant, kDaemon, nullptr, s.model->id, std::move(pools)};
  return {session.tenant, session.id, &session, s.model->id, std::move(pools)};
}

std::vector<PoolId> Store::Impl::PoolsOf(const Session& session, Tier tier) {
  if (tier == Tier::kHost) return {PoolId::Host()};
  return {PoolId::Device(session.device), PoolId::Host()};
}

std::string Store::Impl::NameOfPool(PoolId pool) const {
  const std::string tier(NameOf(pool.tier()));
  return pool.tier() == Tier::kHost || pools_.devices() == 1 ? tier
                                                             : tier + " " + pools_.name(pool);
}

uint32_t Store::Impl::AllocateSome(const Taker& taker, uint64_t bytes, uint32_t n,
                                   std::vector<Page*>* out) {
  const size_t before = out->size();
  uint32_t got = 0;
  for (const PoolId pool : taker.pools) {
    if (got < n) got += AllocateIn(taker, pool, bytes, n - got, out);
  }
  Model& model = *models_.at(taker.model);
  for (size_t i = before; i < out->size(); ++i) (*out)[i]->model = model.id;
  model.pages += got;
  NoteFill();
  return got;
}

Status Store::Impl::Exhausted(const Taker& taker, const Shortage& shortage) const {
  UserLimits::User* const user = taker.tenant->user;
  std::string state, limits;
  for (const PoolId pool : taker.pools) {
    if (AtLimit(taker, pool, shortage.bytes)) {
      limits += (limits.empty() ? "" : ",") + std::string(" ") + std::string(NameOf(LimitOf(pool)));
      state += "; " + user_limits_->Describe(user, LimitOf(pool));
      continue;
    }
    state += "; pool '" + NameOfPool(pool) + "' has " + std::to_string(pools_.taken(pool)) +
             " of " + std::to_string(pools_.capacity(pool)) + " bytes in arenas" +
             (pools_.failure(pool).ok() ? "" : ", and its device is lost");
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

Status Store::Impl::Allocate(const Taker& taker, uint64_t bytes, uint32_t n,
                             std::vector<Page*>* out) {
  const size_t before = out->size();
  const uint32_t got = AllocateSome(taker, bytes, n, out);
  if (got == n) return OkStatus();
  FreePages(std::span<Page* const>(*out).subspan(before));
  out->resize(before);
  return Exhausted(taker, {bytes, n, got, {}});
}

uint32_t Store::Impl::TakeByPieces(Session* session, Taker taker, uint64_t bytes, uint32_t n,
                                   std::vector<Page*>* out) {
  const size_t before = out->size();
  out->reserve(before + n);
  uint32_t got = 0;
  for (uint32_t some = 0; got < n; got += some) {
    const uint32_t wanted = std::min(n - got, kPiecePages);
    taker.ahead = bytes * std::min<uint64_t>(n - got - wanted, kEvictPages);
    some = AllocateSome(taker, bytes, wanted, out);
    for (Page* page : std::span<Page* const>(*out).last(some)) RefPage(page);
    if (some < wanted) {
      Untake(session, out, before);
      return got + some;
    }
    LetOthersIn(session, some);
  }
  return got;
}

void Store::Impl::Untake(Session* session, std::vector<Page*>* pages, size_t left) {
  while (pages->size() > left) {
    const size_t some = std::min<size_t>(pages->size() - left, kPiecePages);
    const std::span<Page* const> last = std::span<Page* const>(*pages).last(some);
    for (Page* page : last) pools_.Unref(page);
    FreePages(last);
    pages->resize(pages->size() - some);
    LetOthersIn(session, some);
  }
}

Status Store::Impl::TakeUpTo(Session* session, Sequence* s, uint64_t tokens) {
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
    return Exhausted(taker, {kind.bytes, kind.missing(), got, TokensThatFit(taker, *s)});
  }
  return OkStatus();
}

// A client that mapped an arena read-only keeps that mapping: it is never made its writer.
bool Store::Impl::MayAdopt(const Taker& taker, const Arena& arena) {
  return taker.session != nullptr && !taker.session->granted.contains(arena.id);
}

// The room in whole granules, of which arenas are made.
uint64_t Store::Impl::RoomOf(const Taker& taker, PoolId pool) const {
  const uint64_t room = user_limits_->Room(taker.tenant->user, LimitOf(pool));
  return room - room % pools_.granularity(pool);
}

// What others have would not help then.
bool Store::Impl::AtLimit(const Taker& taker, PoolId pool, uint64_t bytes) const {
  return RoomOf(taker, pool) < bytes;
}

bool Store::Impl::AddArena(const Taker& taker, PoolId pool, uint64_t bytes) {
  const uint64_t size =
      pools_.AddArena(pool, taker.tenant->id, taker.writer, bytes, RoomOf(taker, pool));
  user_limits_->Note(taker.tenant->user, LimitOf(pool), size);
  return size != 0;
}

uint32_t Store::Impl::AllocateIn(const Taker& taker, PoolId pool, uint64_t bytes, uint32_t n,
                                 std::vector<Page*>* out) {
  uint32_t got = 0;
  if (!pools_.failure(pool).ok()) return got;
  const auto take = [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    got += pools_.Take(pool, taker.tenant->id, taker.writer, bytes, n - got, out);
  };
  take();
  // What this tenant has retired, as far as that helps; of all others before anything is dropped.
  for (bool more = true; got < n && more; take()) more = ReclaimLocked(taker.tenant, kReclaimPages);
  bool reclaimed = false;
  const auto may_adopt = [&](const Arena& arena) { return MayAdopt(taker, arena); };
  while (got < n && pools_.Adopt(pool, taker.tenant->id, taker.writer, bytes, may_adopt)) take();
  const auto may_drop = [this](const Arena& arena)
                            KVS_NO_THREAD_SAFETY_ANALYSIS { return !Fenced(arena); };
  while (got < n) {
    if (!AddArena(taker, pool, bytes)) {
      if (!std::exchange(reclaimed, true)) ReclaimLocked();
      if (!pools_.DropEmpty(pool, may_drop)) {
        if (!taker.evicts) break;
        const uint64_t room = bytes * (n - got) + taker.ahead;
        const Tenant* const own = AtLimit(taker, pool, bytes) ? taker.tenant : nullptr;
        if (!EvictFor(taker, pool, room) && !EvictArtefact(pool, own)) break;
      }
    }
    take();
  }
  return got;
}

bool Store::Impl::Fenced(const Arena& arena) const {
  const auto it = sessions_.find(arena.writer);
  return it != sessions_.end() && it->second->fenced;
}

// Only pages whose space the taker can use are worth dropping: those in its own arenas, and those
// of arenas that go back to the pool because nothing else is in them.
bool Store::Impl::EvictFor(const Taker& taker, PoolId pool, uint64_t bytes) {
  const bool only_own = AtLimit(taker, pool, bytes);
  uint64_t expected = 0;
  std::vector<Page*> victims;
  std::set<const Arena*> emptied;
  Page* next = nullptr;
  for (Page* page = prefix_.oldest(pool); page != nullptr && expected < bytes; page = next) {
    const Arena& arena = *page->arena;
    const bool own = arena.writer == taker.writer && arena.tenant == taker.tenant->id;
    next = page->newer;
    if (only_own && arena.tenant != taker.tenant->id) continue;
    if (!own && (arena.live != 0 || Fenced(arena) || emptied.contains(&arena))) continue;
    if (page->chances > 0) {
      next = prefix_.Spare(page);
      continue;
    }
    if (own) victims.push_back(page);
    if (!own) emptied.insert(&arena);
    expected += own ? page->bytes : arena.block.bytes;
  }
  if (!emptied.empty()) {
    for (Page* page = prefix_.oldest(pool); page != nullptr; page = page->newer) {
      if (emptied.contains(page->arena)) victims.push_back(page);
    }
  }
  std::set<Tenant*> tenants;
  uint64_t used = 0;
  for (const auto& [id, arena] : pools_.arenas()) used += arena->extents.used();
  for (Page* page : victims) {
    tenants.insert(tenants_by_id_[page->arena->tenant]);
    EvictPage(page);
  }
  for (Tenant* tenant : tenants) Advance(tenant);
  ReclaimLocked();
  uint64_t left = 0;
  for (const auto& [id, arena] : pools_.arenas()) left += arena->extents.used();
  return left < used;  // else readers hold what was dropped: dropping more helps nobody
}

void Store::Impl::EvictPage(Page* page) {
  ++counters_.evicted_pages;
  counters_.evicted_stored_pages += page->stored;
  prefix_.Erase(page);
  Retire(page);
}

bool Store::Impl::MayGo(const Artefact& artefact) const {
  return artefact.unused() && !prefix_.pinned().contains(artefact.key);
}

bool Store::Impl::EvictArtefact(PoolId pool, const Tenant* tenant) {
  const auto idle = [this, pool, tenant](const Artefact& a) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const auto in_pool = [pool, tenant](const Extent& e) {
      const Arena& arena = *e.page->arena;
      return arena.pool == pool && (tenant == nullptr || arena.tenant == tenant->id);
    };
    return MayGo(a) && std::any_of(a.extents.begin(), a.extents.end(), in_pool);
  };
  std::optional<Artefact> oldest = artefacts_.EvictOldest(idle);
  if (!oldest) return false;
  DropArtefact(std::move(*oldest));
  return true;
}

void Store::Impl::DropArtefact(Artefact artefact) {
  if (artefact.extents.empty()) return;
  Tenant* tenant = tenants_by_id_[artefact.extents.front().page->arena->tenant];
  for (const Extent& extent : artefact.extents) --extent.page->artefacts;
  ReleaseExtents(&artefact.extents);
  Advance(tenant);
  ReclaimLocked();
}

void Store::Impl::RefPage(Page* page) {
  if (page->refs == 0 && page->indexed) prefix_.MarkUsed(page);
  pools_.Ref(page);
}

void Store::Impl::Release(Page* page) {
  pools_.Unref(page);
  if (page->refs > 0) return;
  if (page->indexed) {
    prefix_.MarkCached(page);
  } else {
    Retire(page);
  }
}

// From the last to the first, so that of a prefix the end is evicted before its beginning.
void Store::Impl::ReleaseAll(std::vector<Page*>* pages) {
  for (; !pages->empty(); pages->pop_back()) {
    if (pages->back() != nullptr) Release(pages->back());
  }
}

void Store::Impl::ReleaseAll(Session* session, std::vector<Page*>* pages) {
  for (; !pages->empty(); LetOthersIn(session, 1)) {
    if (pages->back() != nullptr) Release(pages->back());
    pages->pop_back();
  }
}

void Store::Impl::ReleaseExtents(std::vector<Extent>* extents) {
  for (; !extents->empty(); extents->pop_back()) Release(extents->back().page);
}

void Store::Impl::Retire(Page* page) {
  pools_.Retire(page);
  Tenant* tenant = tenants_by_id_[page->arena->tenant];
  tenant->retired.Push(tenant->epoch, page);
}

void Store::Impl::FreePages(std::span<Page* const> pages) {
  for (const Page* page : pages) {
    const auto model = models_.find(page->model);
    KVS_CHECK(model != models_.end());
    if (--model->second->pages == 0 && model->second->sessions == 0) models_.erase(model);
  }
  pools_.Free(pages);
}

// What was retired so far stays until every reader that is inside a step now has left it.
void Store::Impl::Advance(Tenant* tenant) {
  ++tenant->epoch;
  for (Session* session : tenant->sessions) {
    session->memory->tables()->global_epoch.store(tenant->epoch, std::memory_order_seq_cst);
  }
}

void Store::Impl::ReclaimLocked() {
  for (Tenant* tenant : tenants_by_id_) ReclaimLocked(tenant);
}

void Store::Impl::ReclaimByPieces(Tenant* tenant) {
  while (ReclaimLocked(tenant, kReclaimPages)) mu_.Yield();
}

bool Store::Impl::ReclaimLocked(Tenant* tenant, size_t most) {
  uint64_t oldest = kNoReader;
  for (Session* session : tenant->sessions) {
    const uint64_t own = OldestReader(*session->memory->header());
    oldest = std::min(oldest, own);
    SessionMemory* memory = session->memory.get();
    session->retired_tables.Reclaim(own, [&](shm::SequenceTable* t) { memory->FreeTable(t); });
    session->retired_heat.Reclaim(own, [&](HeatSlice heat) { memory->FreeHeat(heat); });
  }
  std::vector<Page*> passed;
  const auto free = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (page->jobs > 0) {
      parked_.insert(page);  // the last of the jobs frees it
    } else {
      passed.push_back(page);
    }
  };
  const bool more = tenant->retired.Reclaim(oldest, free, most);
  FreePages(passed);
  return more;
}

void Store::Impl::Reclaim() {
  MutexLock lock(mu_);
  DropLost();
  for (size_t i = 0; i < tenants_by_id_.size(); ++i) ReclaimByPieces(tenants_by_id_[i]);
}

Memory Store::Impl::memory(Tier tier) const {
  MutexLock lock(mu_);
  return pools_.memory(tier);
}

std::byte* Store::Impl::ArenaBase(uint32_t id) const {
  MutexLock lock(mu_);
  const Arena* arena = pools_.Find(id);
  return arena == nullptr ? nullptr : arena->block.base;
}

Status Store::Impl::ReachFromDevice(uint32_t id, uint32_t device) const {
  const std::byte* const base = ArenaBase(id);
  if (base == nullptr) {
    return Internal("TABLE_INVALID", "arena " + std::to_string(id) + " does not exist");
  }
  return pools_.Reach(PoolId::Device(device), base);
}

}  // namespace kvstrata
