// Pages between the prefix index and the tier below: copied out for its writer, taken in for a
// sequence that opens. Bytes are copied outside of the lock: on the way out a page is held as those
// that a recompression reads are, on the way in by references in `loads_`.
#include "server/store/page_tier.h"

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

}  // namespace

void Store::Impl::SetPageTier(PageTier* tier) {
  MutexLock lock(mu_);
  tier_ = tier;
}

void Store::Impl::EnterPrefix(Page* page) {
  if (prefix_.Insert(page) && tier_ != nullptr) tier_->Offer(page->key);
}

// --- out -----------------------------------------------------------------------------------------

uint64_t Store::Impl::SealedBytes(const PageKey& key) const {
  MutexLock lock(mu_);
  const Page* page = prefix_.Find(key);
  return page == nullptr ? 0 : page->bytes;
}

bool Store::Impl::CopySealed(const PageKey& key, std::span<std::byte> to) {
  Page* page = nullptr;
  RecompressJob pin;
  {
    MutexLock lock(mu_);
    page = prefix_.Find(key);
    if (page == nullptr || page->bytes != to.size()) return false;
    pin.id = next_job_++;
    ++page->jobs;
    jobs_[pin.id].push_back(page);
  }
  const Status copied = ReadPage(*page, to.data());
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

// The pages of the longest prefix that memory and tier have together, and its index blocks.
std::vector<Store::Impl::Wanted> Store::Impl::WantedOf(const Opening& o, const PageTier& tier) {
  const Sequence& s = *o.sequence;
  const size_t block_pages =
      s.SharesIndex() ? static_cast<size_t>(s.index.block_tokens) / s.page_tokens() : 0;
  std::vector<Wanted> all;
  for (size_t i = 0; i < o.keys.size(); ++i) {
    all.push_back({o.keys[i], false, false});
    if (block_pages == 0 || (i + 1) % block_pages != 0) continue;
    all.push_back({IndexBlockKey(o.keys[i], s.index), true, false});
  }
  {
    MutexLock lock(mu_);
    for (Wanted& w : all) w.here = prefix_.Find(w.key) != nullptr;
  }
  std::vector<Wanted> wanted;
  bool blocks = true;
  for (const Wanted& w : all) {
    if (w.index && !blocks) continue;
    const bool there = w.here || tier.Holds(w.key);
    if (there) {
      wanted.push_back(w);
    } else if (w.index) {
      blocks = false;
    } else {
      break;
    }
  }
  return wanted;
}

std::vector<PageKey> Store::Impl::BeginLoad(Opening* o, const PageTier& tier) {
  std::vector<Wanted> wanted = WantedOf(*o, tier);
  std::vector<PageKey> keys;
  MutexLock lock(mu_);
  std::vector<Page*> held;
  for (Wanted& w : wanted) {
    Page* page = prefix_.Find(w.key);
    w.here = page != nullptr;
    if (w.here) {
      held.push_back(page);
    } else {
      keys.push_back(w.key);
      o->loads_index.push_back(w.index);
    }
  }
  if (keys.empty()) return keys;
  for (Page* page : held) RefPage(page);
  o->load = next_load_++;
  loads_.emplace(o->load, std::move(held));
  return keys;
}

std::vector<Page*> Store::Impl::TakeForLoad(const Opening& o, size_t first,
                                            std::span<const std::span<const std::byte>> values,
                                            bool* more) {
  const Result<Session*> session = FindSession(o.session);
  std::vector<Page*> taken;
  *more = session.ok();
  if (!*more) return taken;
  const Sequence& s = *o.sequence;
  // The daemon's own arenas take them: no session writes there.
  Taker taker = TakerOf(**session, s);
  taker.writer = kDaemon;
  taker.session = nullptr;
  taken.resize(values.size(), nullptr);
  for (size_t i = 0; i < values.size() && *more; ++i) {
    const bool index = o.loads_index[first + i];
    const uint64_t bytes =
        WholeBlocks(index ? s.index.block_bytes : s.model->desc.geometry.page_bytes());
    std::vector<Page*> one;
    const bool came = values[i].size() == bytes && Allocate(taker, bytes, 1, &one).ok();
    if (!came) {
      *more = index;
      continue;
    }
    taken[i] = one.front();
    taken[i]->sealed = taken[i]->stored = true;
    RefPage(taken[i]);
    loads_.at(o.load).push_back(taken[i]);
  }
  return taken;
}

bool Store::Impl::TakeLoaded(Opening* o, size_t first,
                             std::span<const std::span<const std::byte>> values,
                             std::span<const PageKey> keys) {
  std::vector<Page*> taken;
  bool more = true;
  {
    MutexLock lock(mu_);
    taken = TakeForLoad(*o, first, values, &more);
  }
  size_t copied = 0;
  for (; copied < taken.size(); ++copied) {
    if (taken[copied] == nullptr) continue;
    if (!WritePage(*taken[copied], values[copied].data()).ok()) break;
  }
  more = more && copied == taken.size();
  MutexLock lock(mu_);
  for (size_t i = 0; i < copied; ++i) {
    if (taken[i] == nullptr) continue;
    taken[i]->key = keys[first + i];
    // If somebody else was faster, theirs is found, and ours goes with the load.
    if (prefix_.Insert(taken[i])) ++counters_.loaded_pages;
  }
  return more;
}

void Store::Impl::EndLoad(Opening* o) {
  const auto found = loads_.find(o->load);
  if (found == loads_.end()) return;
  std::vector<Page*> held = std::move(found->second);
  loads_.erase(found);
  Tenant* tenant = held.empty() ? nullptr : tenants_by_id_[held.front()->arena->tenant];
  ReleaseAll(&held);
  if (tenant != nullptr) Advance(tenant);
}

void Store::Impl::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                               std::span<const int32_t> tokens, OpenDone done) {
  Result<Opening> prepared = PrepareOpen(session, model, plan, tokens);
  if (!prepared.ok()) return done(prepared.status());
  PageTier* tier = nullptr;
  {
    MutexLock lock(mu_);
    tier = tier_;
  }
  if (tier == nullptr) return done(FinishOpen(&*prepared));
  const auto o = std::make_shared<Opening>(std::move(*prepared));
  PrefixLoad load;
  load.keys = BeginLoad(o.get(), *tier);
  if (load.keys.empty()) return done(FinishOpen(o.get()));
  load.take = [this, o, keys = load.keys](size_t first, auto values) {
    return TakeLoaded(o.get(), first, values, keys);
  };
  load.done = [this, o, done] { done(FinishOpen(o.get())); };
  if (!tier->Load(std::move(load))) done(FinishOpen(o.get()));
}

}  // namespace kvstrata
