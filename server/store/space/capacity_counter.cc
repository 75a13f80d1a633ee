// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/capacity_counter.h"

#include <algorithm>

#include "server/store/books/books.h"
#include "server/store/prompts/opening.h"
#include "server/store/references/eviction.h"
#include "server/store/references/page_references.h"

namespace kvstrata {
namespace {

uint64_t FreePagesOf(const Arena& arena, uint64_t bytes) {
  uint64_t pages = 0;
  for (const auto& [offset, size] : arena.extents.free_extents()) pages += size / bytes;
  return pages;
}

}  // namespace

// The room in whole granules, of which arenas are made.
uint64_t CapacityCounter::RoomOf(const Taker& taker, PoolId pool) const {
  const uint64_t room = options_.user_limits->Room(taker.tenant->user, LimitOf(pool));
  return room - room % books_.memory.granularity(pool);
}

// Pages of new arenas that together have so many bytes.
uint64_t CapacityCounter::PagesOfArenas(PoolId pool, uint64_t left, uint64_t bytes) const {
  const uint64_t arena =
      std::max(books_.pools.arena_bytes(pool), RoundUp(bytes, books_.memory.granularity(pool)));
  return left / arena * (arena / bytes) + left % arena / bytes;
}

bool CapacityCounter::MayTakeFrom(const Taker& taker, const Arena& arena) {
  if (arena.tenant != taker.tenant->id) return false;
  return arena.writer == taker.writer || (arena.writer == kOrphan && MayAdopt(taker, arena));
}

// What is evicted between pages that stay is taken to lie side by side, where `bytes` is larger.
uint64_t CapacityCounter::CountRoom(const Taker& taker, PoolId pool, uint64_t bytes,
                                    const BytesByArena* unused) const {
  if (!books_.memory.failure(pool).ok()) return 0;
  const auto evicted = [unused](const Arena& arena) -> uint64_t {
    if (unused == nullptr) return 0;
    const auto extents = unused->find(arena.id);
    return arena.cached + (extents == unused->end() ? 0 : extents->second);
  };
  uint64_t pages = 0, dropped = 0, own_dropped = 0;  // bytes of arenas that are, or get, empty
  for (const auto& [id, arena] : books_.pools.arenas()) {
    if (arena->pool != pool) continue;
    const uint64_t goes = evicted(*arena);
    const bool empties = arena->extents.used() == goes;
    if (MayTakeFrom(taker, *arena)) {
      pages += empties ? arena->memory.bytes / bytes : FreePagesOf(*arena, bytes) + goes / bytes;
    } else if (empties && !catalog_.Fenced(*arena)) {
      dropped += arena->memory.bytes;
      if (arena->tenant == taker.tenant->id) own_dropped += arena->memory.bytes;
    }
  }
  const uint64_t capacity = books_.memory.capacity(pool),
                 taken = books_.pools.taken(pool) - dropped;
  const uint64_t left = capacity - std::min(capacity, taken);
  const uint64_t allowed = std::min(RoomOf(taker, pool), capacity) + own_dropped;
  return pages + PagesOfArenas(pool, std::min(left, allowed), bytes);
}

Slots CapacityCounter::CountSlots(const Taker& taker, const TokenFit& fit, PoolId pool,
                                  const BytesByArena* unused) const {
  Slots slots{CountRoom(taker, pool, fit.page_bytes(), unused), 0};
  if (fit.block_bytes() != 0) slots.blocks = CountRoom(taker, pool, fit.block_bytes(), unused);
  return slots;
}

PoolCapacity CapacityCounter::CapacityOf(const Taker& taker, const TokenFit& fit, PoolId pool,
                                         const BytesByArena& unused, Slots* all) const {
  const auto room = [&](const Slots& slots) {
    return Room{fit.Tokens(slots), slots.pages * fit.page_bytes()};
  };
  const Slots after_eviction = CountSlots(taker, fit, pool, &unused);
  *all += after_eviction;
  Room limit{kUnlimited, options_.user_limits->Room(taker.tenant->user, LimitOf(pool))};
  if (limit.bytes != kUnlimited) {
    const auto slots = [&](uint64_t bytes) KVS_REQUIRES(store_lock) {
      return bytes == 0 ? 0 : PagesOfArenas(pool, RoomOf(taker, pool), bytes);
    };
    limit.tokens = fit.Tokens({slots(fit.page_bytes()), slots(fit.block_bytes())});
  }
  return {room(CountSlots(taker, fit, pool, nullptr)), room(after_eviction), limit};
}

uint64_t CapacityCounter::TokensThatFit(const Taker& taker, const Sequence& s) const {
  const TokenFit fit(s);
  Slots free;
  for (const PoolId pool : taker.pools) free += CountSlots(taker, fit, pool, nullptr);
  const uint64_t tokens = fit.Tokens(free, s.pages.size(), s.index_blocks.size());
  return s.table == nullptr ? OpenTokens(tokens) : tokens;
}

uint32_t CapacityCounter::OpenTokens(uint64_t tokens) const {
  if (tokens >= kMaxSequenceTokens) return kMaxSequenceTokens;
  return static_cast<uint32_t>(tokens - std::min<uint64_t>(tokens, options_.headroom_tokens));
}

Result<Capacity> CapacityCounter::CountCapacity(uint64_t session_id, uint64_t model,
                                                std::string_view plan) {
  KVS_ASSIGN_OR_RETURN(const Opening o,
                       BeginOpening(&books_.mu, &catalog_, plans_, session_id, model, plan));
  references_.Reclaim();  // by pieces
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  const Taker taker = TakerOf(*session, *o.sequence);
  const TokenFit fit(*o.sequence);
  BytesByArena unused;
  for (const Page* page : eviction_.UnusedExtents()) unused[page->arena->id] += page->bytes;
  Capacity capacity;
  Slots all;
  capacity.device = CapacityOf(taker, fit, PoolId::Device(session->device), unused, &all);
  capacity.host = CapacityOf(taker, fit, PoolId::Host(), unused, &all);
  capacity.open_tokens = OpenTokens(fit.Tokens(all));
  return capacity;
}

}  // namespace kvstrata
