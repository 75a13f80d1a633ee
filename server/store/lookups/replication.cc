// SPDX-License-Identifier: Apache-2.0
#include "server/store/lookups/replication.h"

#include <algorithm>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/prompts/opening.h"
#include "server/store/references/page_references.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/page_copies.h"

namespace kvstrata {

void Replication::SetReplicationQueue(Post post) {
  StoreLock lock(books_.mu);
  post_ = std::move(post);
}

Replication::Post Replication::SlowOpens() const {
  StoreLock lock(books_.mu);
  return post_;
}

void Replication::GoOn(const Opening& o, std::function<void()> then) {
  Post post;
  {
    StoreLock lock(books_.mu);
    references_.DropLost();
    if (post_ && !PrefixElsewhere(o).empty()) post = post_;
  }
  if (!post) return then();
  post(std::move(then));
}

void Replication::Replicate(Opening* o) {
  if (books_.memory.ids().size() == 2) return;  // one device, and host
  CopyPlan plan;
  {
    StoreLock lock(books_.mu);
    references_.DropLost();
    plan = PlanReplicas(o);
  }
  const Geometry& geometry = o->sequence->model->desc.geometry;
  if (plan.copies.empty() || !copies_.Copy(plan, geometry).ok()) return;
  StoreLock lock(books_.mu);
  for (const PlannedCopy& c : plan.copies) EnterReplica(*c.source, c.copy, o->device);
}

std::vector<Page*> Replication::PrefixElsewhere(const Opening& o) {
  if (books_.memory.ids().size() == 2) return {};
  const std::optional<RawFree> artefact =
      prefixes_.RawFreeBy(o.sequence->plan, o.artefact, o.device);
  Hit hit = prefixes_.FindPrefix(o.question(), artefact, std::nullopt);
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

bool Replication::IsOn(uint32_t device, const Page& page) const {
  return books_.prefix.FindFor(device, page.key) != nullptr;
}

CopyPlan Replication::PlanReplicas(Opening* o) {
  CopyPlan plan;
  const Result<Session*> session = catalog_.FindSession(o->session);
  if (!session.ok()) return plan;
  const std::vector<Page*> pages = PrefixElsewhere(*o);
  // All of them: making room for one must not evict another.
  for (const Page* page : pages) {
    Page* const near = books_.prefix.FindFor(o->device, page->key);
    loads_.HoldForLoad(o, near != nullptr ? near : books_.prefix.Find(page->key));
  }
  const Taker taker{(*session)->tenant, kDaemon, nullptr, o->sequence->model->id,
                    PoolsOf(**session, Tier::kDevice)};
  for (Page* page : pages) {
    if (IsOn(o->device, *page)) continue;
    std::vector<Page*> taken;
    if (!allocator_.Allocate(taker, page->bytes, 1, &taken).ok())
      break;  // a shorter prefix will do
    taken.front()->sealed = true;
    loads_.HoldForLoad(o, taken.front());
    plan.copies.push_back({page, taken.front()});
  }
  return plan;
}

void Replication::EnterReplica(const Page& source, Page* copy, uint32_t device) {
  copy->key = source.key;
  copy->summary = source.summary;
  copy->stored = source.stored;
  if (source.series != nullptr) copy->series = std::make_unique<Series>(*source.series);
  // If somebody else was faster, theirs is found, and ours goes with the load.
  if (books_.prefix.FindFor(device, copy->key) != nullptr) return;
  if (books_.prefix.Find(copy->key) == nullptr) {
    (void)books_.prefix.Insert(copy);  // the original has left memory meanwhile
  } else {
    books_.prefix.InsertReplica(copy);
  }
  ++books_.counters.replicated_pages;
  books_.counters.replicated_bytes += copy->bytes;
}

}  // namespace kvstrata
