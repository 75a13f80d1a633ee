// Raw pages whose rows a codec holds: `keep_raw` says whether they go back, or to `host`, where
// they stay readable for other plans and later turns (ADR 5). Bytes are copied outside of
// the lock, as moves are (move.cc).
#include <algorithm>
#include <optional>
#include <string>

#include "server/store/long_request.h"

namespace kvstrata {

// Whole pages among the released positions that the sequence still has.
std::vector<size_t> Store::Impl::ReleasedPages(const Sequence& s) {
  const size_t page = s.page_tokens();
  std::vector<size_t> positions;
  for (const Run& run : s.codec->released) {
    const size_t end = std::min<size_t>(static_cast<size_t>(run.end), s.summarised_tokens()) / page;
    for (size_t i = (static_cast<size_t>(run.begin) + page - 1) / page; i < end; ++i) {
      if (s.pages[i] != nullptr && s.pages[i]->sealed) positions.push_back(i);
    }
  }
  return positions;
}

// Releases a page, and makes the prefix index forget it if nobody else holds it and no pin does.
void Store::Impl::DropRaw(Page* page) {
  if (page->refs == 1 && page->indexed && !page->pinned) prefix_.Erase(page);
  Release(page);
}

uint64_t Store::Impl::GiveBack(Sequence* s, std::span<const size_t> positions) {
  uint64_t bytes = 0;
  for (const size_t i : positions) {
    bytes += s->pages[i]->bytes;
    DropRaw(s->pages[i]);
    s->pages[i] = nullptr;
  }
  return bytes;
}

// Somebody with the same prefix may have moved these pages already; whether there was one.
bool Store::Impl::UseHostCopies(Sequence* s, std::vector<size_t>* positions) {
  const auto swap = [this, s](size_t i) KVS_NO_THREAD_SAFETY_ANALYSIS {
    Page* copy = prefix_.Find(s->pages[i]->key);
    if (copy == nullptr || copy == s->pages[i] || copy->arena->tier != Tier::kHost) return false;
    RefPage(copy);
    Release(s->pages[i]);
    s->pages[i] = copy;
    return true;
  };
  return std::erase_if(*positions, swap) > 0;
}

// Whether `n` released pages go back instead of to `host`.
bool Store::Impl::GivesBack(const Sequence& s, size_t n) const {
  if (s.plan.stored.keep_raw != KeepRaw::kAuto) return s.plan.stored.keep_raw == KeepRaw::kNo;
  const auto page_bytes = static_cast<uint64_t>(s.model->desc.geometry.page_bytes());
  return pools_.capacity(PoolId::Host()) < pools_.used(PoolId::Host()) + n * page_bytes;
}

Status Store::Impl::PlanPlacing(Sequence* s, std::vector<Copy>* copies, uint64_t* bytes) {
  std::vector<size_t> positions = ReleasedPages(*s);
  if (s->plan.stored.keep_raw != KeepRaw::kNo) {
    std::erase_if(positions, [s](size_t i) { return s->pages[i]->arena->tier == Tier::kHost; });
  }
  if (positions.empty()) return OkStatus();
  Session* session = sessions_.at(s->session).get();
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * table,
                       ReserveTable(session, *s, s->table->page_capacity));
  bool changed = s->plan.stored.keep_raw != KeepRaw::kNo && UseHostCopies(s, &positions);
  const auto page_bytes = static_cast<uint64_t>(s->model->desc.geometry.page_bytes());
  std::vector<Page*> taken;
  Status status;
  bool give_back = GivesBack(*s, positions.size());
  if (!give_back && !positions.empty()) {
    status = Allocate({session->tenant, kDaemon, nullptr, s->model->id, {PoolId::Host()}},
                      page_bytes, static_cast<uint32_t>(positions.size()), &taken);
    give_back = !status.ok() && s->plan.stored.keep_raw == KeepRaw::kAuto;
  }
  if (give_back) {
    *bytes += GiveBack(s, positions);
    changed = true;
    status = OkStatus();
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    copies->push_back({false, static_cast<uint32_t>(positions[i]), s->pages[positions[i]], taken[i],
                       s->page_tokens(), true, session->tenant->id, false});
  }
  Pin(*copies);
  if (changed) {
    Publish(session, s, table);
    Advance(session->tenant);
  } else {
    session->memory->FreeTable(table);
  }
  return status;
}

Status Store::Impl::PlaceRaw(uint64_t sequence, uint64_t* bytes) {
  std::vector<Copy> copies;
  Geometry geometry;
  {
    MutexLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Sequence * s, FindSequence(sequence));
    geometry = s->model->desc.geometry;
    KVS_RETURN_IF_ERROR(PlanPlacing(s, &copies, bytes));
    if (copies.empty()) return OkStatus();
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
  for (const Copy& c : copies) *bytes += c.used ? c.copy->bytes : 0;
  return OkStatus();
}

}  // namespace kvstrata
