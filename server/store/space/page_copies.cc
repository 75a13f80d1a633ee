// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/page_copies.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/space/page_allocator.h"

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

Status PageCopies::TakeCopies(Session* session, const Taker& taker, CopyPlan* plan,
                              std::optional<uint64_t> fits) {
  const std::span<PlannedCopy> all(plan->copies);
  for (size_t i = 0, some = 0; i < all.size(); i += some) {
    const uint64_t bytes = all[i].source->bytes;
    const auto other = [bytes](const PlannedCopy& c) { return c.source->bytes != bytes; };
    const auto next = all.subspan(i, std::min<size_t>(kPiecePages, all.size() - i));
    some = static_cast<size_t>(std::ranges::find_if(next, other) - next.begin());
    std::vector<Page*> taken;
    const uint32_t got = allocator_.AllocateSome(taker, bytes, static_cast<uint32_t>(some), &taken);
    if (got < some) {
      references_.FreePages(taken);
      const Status status = allocator_.Exhausted(
          taker, {bytes, static_cast<uint32_t>(all.size()), static_cast<uint32_t>(i) + got, fits});
      plan->copies.resize(i);
      Discard(plan);
      return status;
    }
    for (size_t k = 0; k < some; ++k) next[k].copy = taken[k];
    Hold(plan, next.first(some));
    catalog_.LetOthersIn(session, some);
  }
  return OkStatus();
}

void PageCopies::Hold(CopyPlan* plan, std::span<const PlannedCopy> copies) {
  if (plan->hold == 0) plan->hold = holds_.Begin();
  for (const PlannedCopy& c : copies) {
    holds_.Refer(plan->hold, c.source);
    holds_.Refer(plan->hold, c.copy);
  }
}

void PageCopies::Discard(CopyPlan* plan) {
  if (plan->hold == 0) return;
  const uint32_t tenant = plan->copies.front().copy->arena->tenant;
  holds_.End(std::exchange(plan->hold, 0));
  references_.Advance(catalog_.tenant(tenant));
}

bool PageCopies::StepsRun() const {
  StoreLock lock(books_.mu);
  return catalog_.StepsRun();
}

Status PageCopies::Copy(const CopyPlan& plan, const Geometry& geometry) {
  std::vector<PageCopy> pages;
  for (const PlannedCopy& c : plan.copies) {
    const bool whole = c.index || c.rows >= static_cast<uint32_t>(geometry.page_tokens);
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
    status = books_.memory.Copy(std::span(pages).subspan(begin, end - begin));
  }
  return status;
}

void PageCopies::TakeOver(Page* source, Page* copy) {
  copy->sealed = true;
  copy->key = source->key;
  copy->summary = source->summary;
  copy->credits = source->credits;
  copy->series = std::move(source->series);
  copy->series_changed = source->series_changed;
  if (source->indexed) books_.prefix.Replace(source, copy);
}

Status PageCopies::SwapIn(Session* session, Sequence* s, CopyPlan* plan) {
  Result<shm::SequenceTable*> table = tables_.ReserveTable(session, *s, s->table->page_capacity);
  if (!table.ok()) {
    Discard(plan);
    return table.status();
  }
  // The sequence's references to the sources, until no table names them.
  const uint64_t replaced = holds_.Begin();
  for (PlannedCopy& c : plan->copies) {
    std::vector<Page*>& list = c.index ? s->index_blocks : s->pages;
    if (c.position >= list.size() || list[c.position] != c.source) continue;  // moved meanwhile
    list[c.position] = c.copy;
    references_.RefPage(c.copy);
    if (c.keeps_key) TakeOver(c.source, c.copy);
    holds_.TakeOver(replaced, c.source);
    c.used = true;
  }
  // The hold ends before the table is written, because it is no sharing; the epoch moves on after
  // it, because until then a reader that enters still finds the sources.
  holds_.End(std::exchange(plan->hold, 0));
  tables_.Publish(session, s, *table);
  holds_.End(replaced);
  references_.Advance(session->tenant);
  return OkStatus();
}

Result<MoveResult> PageCopies::CopyAndSwapIn(uint64_t session_id, uint64_t sequence,
                                             const Geometry& geometry, CopyPlan* plan) {
  const Status copied = Copy(*plan, geometry);
  StoreLock lock(books_.mu);
  const Result<Sequence*> s = copied.ok() ? catalog_.FindSequenceFor(session_id, sequence) : copied;
  if (!s.ok()) {
    Discard(plan);
    return s.status();
  }
  Session* const session = catalog_.SessionOf((*s)->session);
  const LongRequest request(&catalog_, session);
  KVS_RETURN_IF_ERROR(SwapIn(session, *s, plan));
  MoveResult result;
  result.version = (*s)->version;
  for (const PlannedCopy& c : plan->copies) {
    result.pages += c.used;
    result.bytes += c.used ? c.copy->bytes : 0;
  }
  return result;
}

}  // namespace kvstrata
