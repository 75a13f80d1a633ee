// A prefix that lies on another device. A session maps only its own device's arenas, so what it
// opens on is copied there first and entered beside the original: its readers keep it, and the next
// session of this device finds the copy. Held by references in loads_, as what comes from the tier
// below is, until the sequence has its own.
#include <algorithm>
#include <new>
#include <utility>

#include "server/store/store_impl.h"

namespace kvstrata {

void Store::Impl::SetReplicationQueue(std::function<void(std::function<void()>)> post) {
  MutexLock lock(mu_);
  post_replication_ = std::move(post);
}

std::function<void(std::function<void()>)> Store::Impl::SlowOpens() const {
  MutexLock lock(mu_);
  return post_replication_;
}

void Store::Impl::ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done) {
  const auto finish = [this, o, done] {
    Result<OpenedSequence> opened =
        ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence");
    try {
      Replicate(o.get());
      opened = FinishOpen(o.get());
    } catch (const std::bad_alloc&) {
      // In threads that have no request to answer; he who asked hears it here.
    }
    done(opened);
  };
  std::function<void(std::function<void()>)> post;
  {
    MutexLock lock(mu_);
    DropLost();
    if (post_replication_ && !PrefixElsewhere(*o).empty()) post = post_replication_;
  }
  if (!post) return finish();
  post(finish);
}

void Store::Impl::Replicate(Opening* o) {
  if (PoolIds().size() == 2) return;  // one device, and host
  std::vector<Replica> replicas;
  {
    MutexLock lock(mu_);
    DropLost();
    replicas = PlanReplicas(o);
  }
  if (replicas.empty() || !CopyReplicas(replicas)) return;
  MutexLock lock(mu_);
  for (const Replica& replica : replicas) EnterReplica(replica, o->device);
}

std::vector<Page*> Store::Impl::PrefixElsewhere(const Opening& o) {
  if (PoolIds().size() == 2) return {};
  const std::optional<RawFree> artefact = RawFreeBy(o.sequence->plan, o.artefact, o.device);
  Hit hit = FindPrefix(o.question(), artefact, std::nullopt);
  std::vector<Page*> pages = std::move(hit.pages);
  pages.insert(pages.end(), hit.index_blocks.begin(), hit.index_blocks.end());
  std::erase(pages, nullptr);
  const auto here = [this, &o](const Page* page)
                        KVS_NO_THREAD_SAFETY_ANALYSIS { return IsOn(o.device, *page); };
  if (std::ranges::all_of(pages, here)) {
    pages.clear();
  }
  return pages;
}

bool Store::Impl::IsOn(uint32_t device, const Page& page) const {
  return prefix_.FindFor(device, page.key) != nullptr;
}

std::vector<Store::Impl::Replica> Store::Impl::PlanReplicas(Opening* o) {
  std::vector<Replica> replicas;
  const Result<Session*> session = FindSession(o->session);
  if (!session.ok()) return replicas;
  const std::vector<Page*> pages = PrefixElsewhere(*o);
  // All of them: making room for one must not evict another.
  for (const Page* page : pages) {
    Page* const near = prefix_.FindFor(o->device, page->key);
    HoldForLoad(o, near != nullptr ? near : prefix_.Find(page->key));
  }
  const Taker taker{(*session)->tenant, kDaemon, nullptr, o->sequence->model->id,
                    PoolsOf(**session, Tier::kDevice)};
  for (Page* page : pages) {
    if (IsOn(o->device, *page)) continue;
    std::vector<Page*> taken;
    if (!Allocate(taker, page->bytes, 1, &taken).ok()) break;  // a shorter prefix will do
    taken.front()->sealed = true;
    HoldForLoad(o, taken.front());
    replicas.push_back({page, taken.front()});
  }
  return replicas;
}

bool Store::Impl::CopyReplicas(std::span<const Replica> replicas) {
  std::vector<PageCopy> copies;
  for (const auto& [source, copy] : replicas) {
    copies.push_back({source, copy, {source->bytes, source->bytes, 1}});
  }
  return pools_.Copy(copies).ok();
}

void Store::Impl::EnterReplica(const Replica& replica, uint32_t device) {
  const auto& [source, copy] = replica;
  copy->key = source->key;
  copy->summary = source->summary;
  copy->stored = source->stored;
  if (source->series != nullptr) copy->series = std::make_unique<Series>(*source->series);
  // If somebody else was faster, theirs is found, and ours goes with the load.
  if (prefix_.FindFor(device, copy->key) != nullptr) return;
  if (prefix_.Find(copy->key) == nullptr) {
    (void)prefix_.Insert(copy);  // the original has left memory meanwhile
  } else {
    prefix_.InsertReplica(copy);
  }
  ++counters_.replicated_pages;
}

}  // namespace kvstrata
