// Copies: between pools (Move), private ones of shared pages (Grow). Bytes are copied outside of
// the lock, from pages that a reference pins; what changed meanwhile is seen when they are swapped
// in.
#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "server/store/long_request.h"

namespace kvstrata {
namespace {

// Limits one submission, which is waited for: 5 ms of PCIe, so that waiting costs little, and a
// step that begins meanwhile soon finds promotions at their rate.
constexpr uint64_t kBatchBytes = uint64_t{256} << 20;

bool IsPromotion(const PageCopy& c) {
  return c.from->arena->tier == Tier::kHost && c.to->arena->tier == Tier::kDevice;
}

// The first `rows` tokens of a KV page: one run of each layer, K and V, head.
CopyShape RowsOf(const Geometry& g, uint32_t rows) {
  const PageLayout layout = PageLayout::Of(g);
  return {static_cast<uint64_t>(rows * layout.slot_stride),
          static_cast<uint64_t>(layout.head_stride),
          static_cast<uint64_t>(int64_t{2} * g.layers * g.kv_heads)};
}

}  // namespace

Status Store::Impl::TakeCopies(Session* session, const Taker& taker, std::vector<Copy>* copies,
                               std::optional<uint64_t> fits) {
  const std::span<Copy> all(*copies);
  for (size_t i = 0, some = 0; i < all.size(); i += some) {
    const uint64_t bytes = all[i].source->bytes;
    const auto other = [bytes](const Copy& c) { return c.source->bytes != bytes; };
    const auto next = all.subspan(i, std::min<size_t>(kPiecePages, all.size() - i));
    some = static_cast<size_t>(std::ranges::find_if(next, other) - next.begin());
    std::vector<Page*> taken;
    const uint32_t got = AllocateSome(taker, bytes, static_cast<uint32_t>(some), &taken);
    if (got < some) {
      FreePages(taken);
      const Status status = Exhausted(
          taker, {bytes, static_cast<uint32_t>(all.size()), static_cast<uint32_t>(i) + got, fits});
      copies->resize(i);
      Discard(*copies);
      return status;
    }
    for (size_t k = 0; k < some; ++k) next[k].copy = taken[k];
    Pin(next.first(some));
    LetOthersIn(session, some);
  }
  return OkStatus();
}

void Store::Impl::Pin(std::span<const Copy> copies) {
  for (const Copy& c : copies) {
    RefPage(c.source);
    RefPage(c.copy);
    pins_.push_back(c.source);
    pins_.push_back(c.copy);
  }
}

void Store::Impl::Unpin(const std::vector<Copy>& copies) {
  // From the last to the first: where Pin put them, unless another copy goes on beside this one.
  for (size_t i = copies.size(); i-- > 0;) {
    for (Page* page : {copies[i].copy, copies[i].source}) DropPin(page);
  }
  for (const Copy& c : copies) {
    Release(c.copy);
    Release(c.source);
  }
}

void Store::Impl::DropPin(Page* page) {
  const auto it = std::find(pins_.rbegin(), pins_.rend(), page);
  KVS_CHECK(it != pins_.rend());
  *it = pins_.back();
  pins_.pop_back();
}

// The sequence has gone, or no table could be had for the copies.
void Store::Impl::Discard(const std::vector<Copy>& copies) {
  Unpin(copies);
  if (!copies.empty()) Advance(tenants_by_id_[copies.front().tenant]);
}

bool Store::Impl::StepsRun() const {
  MutexLock lock(mu_);
  return std::ranges::any_of(sessions_, [](const auto& entry) {
    return CountReaders(*entry.second->memory->header()) > 0;
  });
}

Status Store::Impl::CopyBytes(const std::vector<Copy>& copies, const Geometry& geometry) {
  std::vector<PageCopy> pages;
  for (const Copy& c : copies) {
    const bool whole = c.index || c.rows == static_cast<uint32_t>(geometry.page_tokens);
    const CopyShape shape =
        whole ? CopyShape{c.copy->bytes, c.copy->bytes, 1} : RowsOf(geometry, c.rows);
    if (shape.width > 0) pages.push_back({c.source, c.copy, shape});
  }
  Status status;
  for (size_t begin = 0, end = 0; begin < pages.size() && status.ok(); begin = end) {
    const bool slowly = std::ranges::any_of(pages, IsPromotion) && StepsRun();
    const uint64_t most = slowly ? promote_rate_.burst_bytes() : kBatchBytes;
    uint64_t bytes = 0, promoted = 0;
    for (; end < pages.size() && bytes < most; ++end) {
      bytes += pages[end].to->bytes;
      promoted += IsPromotion(pages[end]) ? pages[end].to->bytes : 0;
    }
    if (slowly) std::this_thread::sleep_until(promote_rate_.Begin(promoted, Clock::now()));
    status = pools_.Copy(std::span(pages).subspan(begin, end - begin));
  }
  if (status.ok()) return status;
  MutexLock lock(mu_);
  Discard(copies);
  return status;
}

void Store::Impl::TakeOver(Page* source, Page* copy) {
  copy->sealed = true;
  copy->key = source->key;
  copy->summary = source->summary;
  copy->chances = source->chances;
  copy->series = std::move(source->series);
  copy->series_changed = source->series_changed;
  if (source->indexed) prefix_.Replace(source, copy);
}

Status Store::Impl::SwapIn(Session* session, Sequence* s, std::vector<Copy>* copies) {
  Result<shm::SequenceTable*> table = ReserveTable(session, *s, s->table->page_capacity);
  if (!table.ok()) {
    Discard(*copies);
    return table.status();
  }
  for (Copy& c : *copies) {
    std::vector<Page*>& list = c.index ? s->index_blocks : s->pages;
    if (c.position >= list.size() || list[c.position] != c.source) continue;  // moved meanwhile
    list[c.position] = c.copy;
    RefPage(c.copy);
    if (c.keeps_key) TakeOver(c.source, c.copy);
    pins_.push_back(c.source);  // the sequence's reference, until no table names it
    c.used = true;
  }
  // Unpinned before the table is written, because a pin is no sharing; the epoch moves on after it,
  // because until then a reader that enters still finds the sources.
  Unpin(*copies);
  Publish(session, s, *table);
  for (size_t i = copies->size(); i-- > 0;) {
    if (!(*copies)[i].used) continue;
    DropPin((*copies)[i].source);
    Release((*copies)[i].source);
  }
  Advance(session->tenant);
  return OkStatus();
}

Result<MoveResult> Store::Impl::Move(uint64_t sequence, Tier to) {
  return Move(sequence, to, MoveLimit());
}

Result<MoveResult> Store::Impl::Move(uint64_t sequence, Tier to, MoveLimit limit) {
  std::vector<Copy> copies;
  Geometry geometry;
  {
    MutexLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Sequence * s, FindSequence(sequence));
    KVS_RETURN_IF_ERROR(CheckHeld(*s));
    Session* const session = sessions_.at(s->session).get();
    const LongRequest request(this, session);
    const PoolId pool = PoolsOf(*session, to).front();
    if (!pools_.failure(pool).ok()) return pools_.failure(pool);
    Tenant* tenant = session->tenant;
    geometry = s->model->desc.geometry;
    uint64_t bytes = 0;
    for (size_t i = 0; i < s->pages.size(); ++i) {
      LetOthersIn(session, 1);
      Page* page = s->pages[i];
      if (page == nullptr || !page->sealed || page->arena->tier == to) continue;
      bytes += page->bytes;
      if (bytes > limit.room || (bytes > limit.bytes && !copies.empty())) break;
      copies.push_back({false, static_cast<uint32_t>(i), page, nullptr,
                        static_cast<uint32_t>(geometry.page_tokens), true, tenant->id, false});
    }
    if (copies.empty()) return MoveResult{0, 0, s->version};
    // The daemon's own arenas take them: no session writes there.
    const Taker taker{tenant, kDaemon, nullptr, s->model->id, {pool}, limit.evicts};
    KVS_RETURN_IF_ERROR(TakeCopies(session, taker, &copies));
  }
  KVS_RETURN_IF_ERROR(CopyBytes(copies, geometry));
  MutexLock lock(mu_);
  Result<Sequence*> s = FindSequence(sequence);
  if (!s.ok()) {
    Discard(copies);
    return s.status();
  }
  Session* const session = sessions_.at((*s)->session).get();
  const LongRequest request(this, session);
  KVS_RETURN_IF_ERROR(SwapIn(session, *s, &copies));
  MoveResult result;
  result.version = (*s)->version;
  for (const Copy& c : copies) {
    result.pages += c.used;
    result.bytes += c.used ? c.copy->bytes : 0;
  }
  return result;
}

}  // namespace kvstrata
