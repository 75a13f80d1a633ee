// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/moves.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/references/watermarks.h"
#include "server/store/space/page_copies.h"
#include "server/store/space/relief.h"

namespace kvstrata {
namespace {

constexpr double kPressure = 0.8;  // part of a device pool that is in use
constexpr uint64_t kLeastPool = uint64_t{1} << 20, kLargestPool = uint64_t{16} << 40;

}  // namespace

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

bool Moves::UnderPressure() const {
  StoreLock lock(books_.mu);
  return std::ranges::any_of(
      books_.memory.ids(), [this](PoolId pool) KVS_NO_THREAD_SAFETY_ANALYSIS {
        return pool.tier() == Tier::kDevice &&
               static_cast<double>(books_.pools.used(pool)) >
                   kPressure * static_cast<double>(books_.memory.capacity(pool));
      });
}

void Moves::SetMoveSink(std::function<void()> wake) {
  StoreLock lock(books_.mu);
  watermarks_.SetWake(std::move(wake));
}

// Pages that a codec's plan has on host lie there because it needs them no more.
void Moves::NotePromotion(Session* session, const Sequence& s) {
  if (!watermarks_.HasWake() || s.imported || s.codec || s.plan.tier == Tier::kHost) return;
  const auto on_host = [&](const Page* p) KVS_NO_THREAD_SAFETY_ANALYSIS {
    catalog_.LetOthersIn(session, 1);
    return p->sealed && p->arena->tier == Tier::kHost;
  };
  if (std::ranges::none_of(s.pages, on_host)) return;
  promotions_.push_back(s.id);
  watermarks_.Wake();
}

std::optional<uint64_t> Moves::MoveSome(uint64_t bytes) {
  if (const auto promoted = PromoteSome(bytes)) return promoted;
  // Host first: what leaves it makes room for what leaves device.
  const std::span<const PoolId> pools = books_.memory.ids();
  for (size_t i = pools.size(); i-- > 0;) {
    if (const auto moved = relief_.RelieveSome(pools[i], bytes)) return moved;
  }
  return std::nullopt;
}

// --- promotions ----------------------------------------------------------------------------------

std::optional<uint64_t> Moves::PromoteSome(uint64_t bytes) {
  uint64_t sequence = 0;
  MoveLimit limit{bytes, 0, false};
  {
    StoreLock lock(books_.mu);
    if (promotions_.empty()) return std::nullopt;
    sequence = promotions_.front();
    const auto s = catalog_.sequences().find(sequence);
    if (s == catalog_.sequences().end()) {  // closed meanwhile
      promotions_.pop_front();
      return 0;
    }
    const PoolId device = PoolId::Device(catalog_.SessionOf(s->second->session)->device);
    const uint64_t high = watermarks_.HighMark(device);
    limit.room = high - std::min(high, relief_.HeldBytes(device));
  }
  const Result<MoveResult> moved = Move(sequence, Tier::kDevice, limit);
  StoreLock lock(books_.mu);
  if (!moved.ok() || moved->pages == 0) {  // all are there, it was closed, or there is no room
    promotions_.pop_front();
    return 0;
  }
  books_.counters.promoted_pages += moved->pages;
  return moved->bytes;
}

// --- capacities that change ----------------------------------------------------------------------

Result<ResizedPool> Moves::ResizePool(Tier tier, uint64_t bytes, std::string_view device) {
  if (bytes < kLeastPool || bytes > kLargestPool) {
    return InvalidArgument(
        "POOL_SIZE", "capacity is " + std::to_string(bytes) + " bytes; allowed: 1 MiB to 16 TiB");
  }
  if (tier == Tier::kHost && !device.empty()) {
    return InvalidArgument("DEVICE_UNKNOWN", "the host pool has no device; got '" +
                                                 std::string(device) + "', leave it out");
  }
  std::optional<PoolId> only;
  if (!device.empty()) {
    KVS_ASSIGN_OR_RETURN(const uint32_t number, devices_.FindDevice(device));
    only = PoolId::Device(number);
  }
  StoreLock lock(books_.mu);
  const uint64_t before = books_.counters.evicted_pages;
  ResizedPool resized;
  for (const PoolId pool : books_.memory.ids()) {
    if (pool.tier() != tier || (only && pool != *only)) continue;
    books_.memory.SetCapacity(pool, bytes);
    relief_.ShrinkToCapacity(pool);
    resized.capacity_bytes += books_.memory.capacity(pool);
    resized.taken_bytes += books_.pools.taken(pool);
  }
  watermarks_.NoteFill();
  resized.evicted_pages = books_.counters.evicted_pages - before;
  return resized;
}

}  // namespace kvstrata
