// SPDX-License-Identifier: Apache-2.0
#include "server/store/lookups/prefix_loads.h"

#include <optional>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/prompts/opening.h"
#include "server/store/references/page_references.h"
#include "server/store/space/page_allocator.h"

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

std::vector<PageKey> PrefixLoads::BeginLoad(Opening* o) {
  const Sequence& s = *o->sequence;
  std::optional<RawFree> artefact;
  {
    StoreLock lock(books_.mu);
    references_.DropLost();
    artefact = prefixes_.RawFreeBy(s.plan, ArtefactOf(*o));
  }
  const HeldPrefix held = prefixes_.FindAnywhere(o->question(), artefact, o->remote.get());
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
  StoreLock lock(books_.mu);
  for (const Wanted& w : wanted) {
    if (Page* page = books_.prefix.Find(w.key); page != nullptr) {
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

void PrefixLoads::HoldForLoad(Opening* o, Page* page) {
  if (o->load == 0) o->load = holds_.Begin();
  holds_.Refer(o->load, page);
}

std::vector<Page*> PrefixLoads::TakeForLoad(Opening* o, size_t first,
                                            std::span<const LoadedValue> values, bool* more) {
  const Result<Session*> session = catalog_.FindSession(o->session);
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
    if (!IsSound(values[i], bytes) || !allocator_.Allocate(taker, bytes, 1, &one).ok()) {
      *more = index;
      continue;
    }
    taken[i] = one.front();
    taken[i]->sealed = true;
    taken[i]->summary = index;
    HoldForLoad(o, taken[i]);
  }
  return taken;
}

bool PrefixLoads::TakeLoaded(Opening* o, PageTier* tier, size_t first,
                             std::span<const LoadedValue> values, std::span<const PageKey> keys) {
  std::vector<Page*> taken;
  std::vector<bool> stored(values.size());  // in the local tier
  for (size_t i = 0; i < values.size(); ++i) stored[i] = tier->Holds(keys[first + i]);
  bool more = true;
  {
    StoreLock lock(books_.mu);
    taken = TakeForLoad(o, first, values, &more);
  }
  size_t copied = 0;
  for (; copied < taken.size(); ++copied) {
    if (taken[copied] == nullptr) continue;
    if (!books_.memory.Write(*taken[copied], values[copied].front().data()).ok()) break;
  }
  more = more && copied == taken.size();
  StoreLock lock(books_.mu);
  for (size_t i = 0; i < copied; ++i) {
    if (taken[i] == nullptr) continue;
    taken[i]->key = keys[first + i];
    taken[i]->stored = stored[i];
    if (values[i].size() > 1) {
      taken[i]->series = std::make_unique<Series>(*Series::Parse(values[i][1]));
    }
    // If somebody else was faster, theirs is found, and ours goes with the load.
    if (!books_.prefix.Insert(taken[i])) continue;
    ++books_.counters.loaded_pages;
    if (!stored[i]) tier->Offer({taken[i]->key, {}, taken[i]->bytes, OfferedFor::kLoaded});
  }
  return more;
}

void PrefixLoads::EndLoad(Session* session, Opening* o) {
  if (o->load == 0) return;
  const uint32_t tenant = holds_.all().at(o->load).referred.front()->arena->tenant;
  holds_.End(std::exchange(o->load, 0), session);
  references_.Advance(catalog_.tenant(tenant));
}

void PrefixLoads::LoadPrefix(const std::shared_ptr<Opening>& o, PageTier* tier,
                             std::function<void()> then) {
  TierLoad load;
  load.asked = o->asked;
  load.keys = BeginLoad(o.get());
  if (load.keys.empty()) return then();
  load.finds = o->remote;
  load.take = [this, o, tier, keys = load.keys](size_t first, auto values) {
    return TakeLoaded(o.get(), tier, first, values, keys);
  };
  load.done = then;
  if (!tier->Load(std::move(load))) then();
}

}  // namespace kvstrata
