// What of a model a session could have now: counted by the rules of allocate.cc, taking nothing.
#include "server/store/capacity.h"

#include <algorithm>

#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

uint64_t FreePagesOf(const Arena& arena, uint64_t bytes) {
  uint64_t pages = 0;
  for (const auto& [offset, size] : arena.extents.free_extents()) pages += size / bytes;
  return pages;
}

}  // namespace

TokenFit::TokenFit(const Sequence& s)
    : page_tokens_(s.page_tokens()),
      page_bytes_(
          RoundUp(static_cast<uint64_t>(s.model->desc.geometry.page_bytes()), kMemoryGranularity)) {
  if (s.index.kind == IndexLayout::Kind::kNone) return;
  block_tokens_ = static_cast<uint64_t>(s.index.block_tokens);
  block_bytes_ = RoundUp(static_cast<uint64_t>(s.index.block_bytes), kMemoryGranularity);
}

uint64_t TokenFit::PagesFor(uint64_t blocks) const {
  if (block_bytes_ >= page_bytes_) return blocks * RoundUp(block_bytes_, page_bytes_) / page_bytes_;
  const uint64_t in_page = page_bytes_ / block_bytes_;
  return RoundUp(blocks, in_page) / in_page;
}

uint64_t TokenFit::Tokens(const Slots& slots, uint64_t had_pages, uint64_t had_blocks) const {
  const auto fits = [&](uint64_t more) {
    if (block_tokens_ == 0) return more <= slots.pages;
    const uint64_t all = RoundUp((had_pages + more) * page_tokens_, block_tokens_) / block_tokens_;
    const uint64_t blocks = all - std::min(all, had_blocks);
    return blocks <= slots.blocks && more + PagesFor(blocks) <= slots.pages;
  };
  uint64_t least = 0, most = slots.pages;
  while (least < most) {
    const uint64_t middle = most - (most - least) / 2;
    if (fits(middle)) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return (had_pages + least) * page_tokens_;
}

// Pages of new arenas that together have so many bytes.
uint64_t Store::Impl::PagesOfArenas(PoolId pool, uint64_t left, uint64_t bytes) const {
  const uint64_t arena =
      std::max(pools_.arena_bytes(pool), RoundUp(bytes, pools_.granularity(pool)));
  return left / arena * (arena / bytes) + left % arena / bytes;
}

bool Store::Impl::MayTakeFrom(const Taker& taker, const Arena& arena) {
  if (arena.tenant != taker.tenant->id) return false;
  return arena.writer == taker.writer || (arena.writer == kOrphan && MayAdopt(taker, arena));
}

// What is evicted between pages that stay is taken to lie side by side, where `bytes` is larger.
uint64_t Store::Impl::CountRoom(const Taker& taker, PoolId pool, uint64_t bytes,
                                const BytesByArena* unused) const {
  if (!pools_.failure(pool).ok()) return 0;
  const auto evicted = [unused](const Arena& arena) -> uint64_t {
    if (unused == nullptr) return 0;
    const auto extents = unused->find(arena.id);
    return arena.cached + (extents == unused->end() ? 0 : extents->second);
  };
  uint64_t pages = 0, dropped = 0, own_dropped = 0;  // bytes of arenas that are, or get, empty
  for (const auto& [id, arena] : pools_.arenas()) {
    if (arena->pool != pool) continue;
    const uint64_t goes = evicted(*arena);
    const bool empties = arena->extents.used() == goes;
    if (MayTakeFrom(taker, *arena)) {
      pages += empties ? arena->block.bytes / bytes : FreePagesOf(*arena, bytes) + goes / bytes;
    } else if (empties && !Fenced(*arena)) {
      dropped += arena->block.bytes;
      if (arena->tenant == taker.tenant->id) own_dropped += arena->block.bytes;
    }
  }
  const uint64_t capacity = pools_.capacity(pool), taken = pools_.taken(pool) - dropped;
  const uint64_t left = capacity - std::min(capacity, taken);
  const uint64_t allowed = std::min(RoomOf(taker, pool), capacity) + own_dropped;
  return pages + PagesOfArenas(pool, std::min(left, allowed), bytes);
}

Slots Store::Impl::CountSlots(const Taker& taker, const TokenFit& fit, PoolId pool,
                              const BytesByArena* unused) const {
  Slots slots{CountRoom(taker, pool, fit.page_bytes(), unused), 0};
  if (fit.block_bytes() != 0) slots.blocks = CountRoom(taker, pool, fit.block_bytes(), unused);
  return slots;
}

PoolCapacity Store::Impl::CapacityOf(const Taker& taker, const TokenFit& fit, PoolId pool,
                                     const BytesByArena& unused, Slots* all) const {
  const auto room = [&](const Slots& slots) {
    return Room{fit.Tokens(slots), slots.pages * fit.page_bytes()};
  };
  const Slots after_eviction = CountSlots(taker, fit, pool, &unused);
  *all += after_eviction;
  Room limit{kUnlimited, user_limits_->Room(taker.tenant->user, LimitOf(pool))};
  if (limit.bytes != kUnlimited) {
    const auto slots = [&](uint64_t bytes) {
      return bytes == 0 ? 0 : PagesOfArenas(pool, RoomOf(taker, pool), bytes);
    };
    limit.tokens = fit.Tokens({slots(fit.page_bytes()), slots(fit.block_bytes())});
  }
  return {room(CountSlots(taker, fit, pool, nullptr)), room(after_eviction), limit};
}

uint64_t Store::Impl::TokensThatFit(const Taker& taker, const Sequence& s) const {
  const TokenFit fit(s);
  Slots free;
  for (const PoolId pool : taker.pools) free += CountSlots(taker, fit, pool, nullptr);
  const uint64_t tokens = fit.Tokens(free, s.pages.size(), s.index_blocks.size());
  return s.table == nullptr ? OpenTokens(tokens) : tokens;
}

uint32_t Store::Impl::OpenTokens(uint64_t tokens) const {
  if (tokens >= kMaxSequenceTokens) return kMaxSequenceTokens;
  return static_cast<uint32_t>(tokens - std::min<uint64_t>(tokens, options_.headroom_tokens));
}

Result<Capacity> Store::Impl::CountCapacity(uint64_t session_id, uint64_t model,
                                            std::string_view plan) {
  KVS_ASSIGN_OR_RETURN(const Opening o, BeginOpening(session_id, model, plan));
  Reclaim();  // by pieces
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  const Taker taker = TakerOf(*session, *o.sequence);
  const TokenFit fit(*o.sequence);
  BytesByArena unused;
  for (const Page* page : UnusedExtents()) unused[page->arena->id] += page->bytes;
  Capacity capacity;
  Slots all;
  capacity.device = CapacityOf(taker, fit, PoolId::Device(session->device), unused, &all);
  capacity.host = CapacityOf(taker, fit, PoolId::Host(), unused, &all);
  capacity.open_tokens = OpenTokens(fit.Tokens(all));
  return capacity;
}

}  // namespace kvstrata
