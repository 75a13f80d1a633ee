// Pages between the prefix index and the tier below: copied out for its writer, taken in for a
// sequence that opens. Bytes are copied outside of the lock: on the way out a page is held as those
// that a recompression reads are, on the way in by references in `loads_`.
#include "server/store/page_tier.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"
#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

uint64_t WholeBlocks(int64_t bytes) {
  const auto n = static_cast<uint64_t>(bytes);
  return (n + kMemoryGranularity - 1) / kMemoryGranularity * kMemoryGranularity;
}

struct Wanted {
  PageKey key;
  bool index = false;
};

// A page or index block of `bytes`, a page perhaps with its series.
bool IsSound(const LoadedValue& value, uint64_t bytes) {
  if (value.empty() || value.size() > 2 || value.front().size() != bytes) return false;
  return value.size() == 1 || Series::Parse(value[1]).has_value();
}

}  // namespace

void Store::Impl::SetPageTier(PageTier* tier) {
  MutexLock lock(mu_);
  tier_ = tier;
}

void Store::Impl::EnterPrefix(const Sequence& s, Page* page) {
  if (!pools_.failure(page->arena->pool).ok()) return;
  if (prefix_.Insert(page)) return OfferPage(s, *page);
  const bool first_here = page->arena->tier == Tier::kDevice &&
                          prefix_.FindFor(page->arena->pool.device(), page->key) == nullptr;
  if (first_here) prefix_.InsertReplica(page);
}

void Store::Impl::OfferPage(const Sequence& s, const Page& page) {
  const bool goes = s.codec && s.plan.stored.keep_raw == KeepRaw::kNo && !page.summary;
  if (tier_ != nullptr && !goes && !s.model->OfOneSession()) tier_->Offer(page.key);
}

void Store::Impl::OfferKept(const Sequence& s) {
  if (tier_ == nullptr || !s.codec || s.plan.stored.keep_raw != KeepRaw::kNo) return;
  if (s.model->OfOneSession()) return;
  const std::vector<size_t> released = ReleasedPages(s);  // in order
  for (size_t i = 0; i < s.pages.size(); ++i) {
    const Page* page = s.pages[i];
    if (page == nullptr || !page->indexed || (page->stored && !page->series_changed)) continue;
    if (!std::ranges::binary_search(released, i)) tier_->Offer(page->key);
  }
}

// --- out -----------------------------------------------------------------------------------------

std::vector<SealedValue> Store::Impl::Sealed(const PageKey& key) const {
  MutexLock lock(mu_);
  if (const Page* page = prefix_.Find(key); page != nullptr) {
    SealedValue value{key, {page->bytes}, page->series_changed};
    if (page->series != nullptr) value.sizes.push_back(page->series->Encode().size());
    return {std::move(value)};
  }
  const Artefact* artefact = artefacts_.Peek(key);
  if (artefact == nullptr) return {};
  const ArtefactRecord record = RecordOf(*artefact);
  std::vector<SealedValue> values;
  for (size_t i = 0; i < record.parts.size(); ++i) {
    const Page& page = *artefact->extents[i].page;
    values.push_back({PartKey(key, i, record.parts[i]), {page.bytes}, true});
  }
  // It is offered when it was built anew: what is there of it was not good enough.
  values.push_back({key, {EncodeRecord(record).size()}, true});
  return values;
}

RecompressJob Store::Impl::PinForCopy(Page* page) {
  RecompressJob pin;
  pin.id = next_job_++;
  ++page->jobs;
  jobs_[pin.id].push_back(page);
  return pin;
}

bool Store::Impl::CopySealed(const PageKey& key, size_t value,
                             std::span<const std::span<std::byte>> to) {
  Page* page = nullptr;
  std::vector<std::byte> beside;  // what lies in no page; the last buffer
  RecompressJob pin;
  {
    MutexLock lock(mu_);
    page = prefix_.Find(key);
    if (page != nullptr) {
      if (page->series != nullptr) beside = page->series->Encode();
    } else if (const Artefact* artefact = artefacts_.Peek(key); artefact == nullptr) {
      return false;
    } else if (value < artefact->extents.size()) {
      page = artefact->extents[value].page;
    } else {
      ArtefactRecord record = RecordOf(*artefact);
      beside = EncodeRecord(record);
      ledger_.Note(key, std::move(record));
    }
    const size_t buffers = size_t{page != nullptr} + size_t{!beside.empty()};
    if (to.size() != buffers || (page != nullptr && to.front().size() != page->bytes)) return false;
    if (!beside.empty() && to.back().size() != beside.size()) return false;
    if (!beside.empty()) std::ranges::copy(beside, to.back().begin());
    if (page == nullptr) return true;
    page->series_changed = false;
    pin = PinForCopy(page);
  }
  const Status copied = ReadPage(*page, to.front().data());
  MutexLock lock(mu_);
  UnpinJob(pin);
  return copied.ok();
}

void Store::Impl::NoteStored(std::span<const PageKey> keys) {
  MutexLock lock(mu_);
  for (const PageKey& key : keys) {
    if (Page* page = prefix_.Find(key); page != nullptr) page->stored = true;
  }
}

// --- in ------------------------------------------------------------------------------------------

std::vector<PageKey> Store::Impl::BeginLoad(Opening* o) {
  const Sequence& s = *o->sequence;
  std::optional<RawFree> artefact;
  {
    MutexLock lock(mu_);
    DropLost();
    artefact = RawFreeBy(s.plan, o->artefact, o->device);
  }
  const HeldPrefix held = FindAnywhere(o->question(), artefact);
  const PrefixShape shape(o->keys.size(), s.page_tokens(), s.index);
  std::vector<Wanted> wanted;  // in order
  for (size_t i = 0, blocks = 0; i < held.pages.size(); ++i) {
    if (held.pages[i] != HeldIn::kArtefact) wanted.push_back({o->keys[i], false});
    if (blocks == held.blocks || (i + 1) % shape.block_pages != 0) continue;
    wanted.push_back({IndexBlockKey(o->keys[i], s.index), true});
    ++blocks;
  }
  std::vector<PageKey> keys;
  std::vector<Page*> here;
  MutexLock lock(mu_);
  for (const Wanted& w : wanted) {
    if (Page* page = prefix_.Find(w.key); page != nullptr) {
      here.push_back(page);
    } else {
      keys.push_back(w.key);
      o->loads_index.push_back(w.index);
    }
  }
  if (keys.empty()) return keys;
  for (Page* page : here) HoldForLoad(o, page);
  return keys;
}

void Store::Impl::HoldForLoad(Opening* o, Page* page) {
  if (o->load == 0) o->load = next_load_++;
  RefPage(page);
  loads_[o->load].push_back(page);
}

std::vector<Page*> Store::Impl::TakeForLoad(Opening* o, size_t first,
                                            std::span<const LoadedValue> values, bool* more) {
  const Result<Session*> session = FindSession(o->session);
  std::vector<Page*> taken;
  *more = session.ok();
  if (!*more) return taken;
  const Sequence& s = *o->sequence;
  // The daemon's own arenas take them: no session writes there.
  Taker taker = TakerOf(**session, s);
  taker.writer = kDaemon;
  taker.session = nullptr;
  taken.resize(values.size(), nullptr);
  for (size_t i = 0; i < values.size() && *more; ++i) {
    const bool index = o->loads_index[first + i];
    const uint64_t bytes =
        WholeBlocks(index ? s.index.block_bytes : s.model->desc.geometry.page_bytes());
    std::vector<Page*> one;
    if (!IsSound(values[i], bytes) || !Allocate(taker, bytes, 1, &one).ok()) {
      *more = index;
      continue;
    }
    taken[i] = one.front();
    taken[i]->sealed = taken[i]->stored = true;
    taken[i]->summary = index;
    HoldForLoad(o, taken[i]);
  }
  return taken;
}

bool Store::Impl::TakeLoaded(Opening* o, size_t first, std::span<const LoadedValue> values,
                             std::span<const PageKey> keys) {
  std::vector<Page*> taken;
  bool more = true;
  {
    MutexLock lock(mu_);
    taken = TakeForLoad(o, first, values, &more);
  }
  size_t copied = 0;
  for (; copied < taken.size(); ++copied) {
    if (taken[copied] == nullptr) continue;
    if (!WritePage(*taken[copied], values[copied].front().data()).ok()) break;
  }
  more = more && copied == taken.size();
  MutexLock lock(mu_);
  for (size_t i = 0; i < copied; ++i) {
    if (taken[i] == nullptr) continue;
    taken[i]->key = keys[first + i];
    if (values[i].size() > 1) {
      taken[i]->series = std::make_unique<Series>(*Series::Parse(values[i][1]));
    }
    // If somebody else was faster, theirs is found, and ours goes with the load.
    if (prefix_.Insert(taken[i])) ++counters_.loaded_pages;
  }
  return more;
}

void Store::Impl::EndLoad(Session* session, Opening* o) {
  const auto found = loads_.find(o->load);
  if (found == loads_.end()) return;
  std::vector<Page*>& held = found->second;
  Tenant* tenant = held.empty() ? nullptr : tenants_by_id_[held.front()->arena->tenant];
  ReleaseAll(session, &held);
  loads_.erase(o->load);
  if (tenant != nullptr) Advance(tenant);
}

void Store::Impl::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                               std::span<const int32_t> tokens, OpenDone done,
                               const OpenOptions& options) {
  const std::function<void(std::function<void()>)> post = SlowOpens();
  Result<Opening> prepared =
      PrepareOpen(session, model, plan, tokens, options, post ? Files::kKnown : Files::kRead);
  if (prepared.ok() || prepared.status().reason() != kFileUnread) {
    return GoOnOpening(std::move(prepared), done);
  }
  post([this, session, model, plan = std::string(plan),
        tokens = std::vector<int32_t>(tokens.begin(), tokens.end()), options, done] {
    const auto prepare = [&]() -> Result<Opening> {
      try {
        return PrepareOpen(session, model, plan, tokens, options, Files::kRead);
      } catch (const std::bad_alloc&) {
        return ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence");
      }
    };
    GoOnOpening(prepare(), done);
  });
}

void Store::Impl::GoOnOpening(Result<Opening> prepared, const OpenDone& done) {
  if (!prepared.ok()) return done(prepared.status());
  PageTier* tier = nullptr;
  {
    MutexLock lock(mu_);
    tier = tier_;
  }
  const auto o = std::make_shared<Opening>(std::move(*prepared));
  if (tier == nullptr) return ReplicateAndFinish(o, done);
  o->asked = Clock::now();
  LoadArtefact(o, tier, [this, o, tier, done] {
    try {
      LoadPrefix(o, tier, [this, o, done] { ReplicateAndFinish(o, done); });
    } catch (const std::bad_alloc&) {
      done(ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence"));
    }
  });
}

void Store::Impl::LoadPrefix(const std::shared_ptr<Opening>& o, PageTier* tier,
                             std::function<void()> then) {
  TierLoad load;
  load.asked = o->asked;
  load.keys = BeginLoad(o.get());
  if (load.keys.empty()) return then();
  load.take = [this, o, keys = load.keys](size_t first, auto values) {
    return TakeLoaded(o.get(), first, values, keys);
  };
  load.done = then;
  if (!tier->Load(std::move(load))) then();
}

}  // namespace kvstrata
