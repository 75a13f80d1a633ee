// SPDX-License-Identifier: Apache-2.0
// Artefacts from the tier below, when a sequence opens. Written they are as pages are
// (sealed_values.h).
#include <utility>

#include "server/store/books/books.h"
#include "server/store/codecs/codec_extents.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/prompts/opening.h"
#include "server/store/space/page_allocator.h"

namespace kvstrata {
namespace {

uint64_t AllocatedBytes(uint64_t bytes) {
  return (bytes + kMemoryGranularity - 1) / kMemoryGranularity * kMemoryGranularity;
}

bool WasFound(const Opening& o, const PageKey& key) {
  return o.remote != nullptr && o.remote->values.contains(key);
}

}  // namespace

// An artefact serves who is held for all of its prompt that can be, and nobody else: who has to
// compute some of it recompresses the prompt anyway.
bool PrefixLoads::WantsArtefact(const Opening& o, const PageTier& tier) {
  const Plan& plan = o.sequence->plan;
  if (!o.sequence->codec) return false;
  if (!tier.Holds(o.artefact) && !WasFound(o, o.artefact)) return false;
  {
    StoreLock lock(books_.mu);
    if (books_.artefacts.Contains(o.artefact)) return false;
  }
  std::optional<RawFree> artefact;
  if (prefixes_.OpensWithoutRaw(plan)) {
    if (!o.record) return true;  // it says which raw pages may be missing
    artefact = RawFreeOf(*o.record);
  }
  const HeldPrefix held = prefixes_.FindAnywhere(o.question(), artefact, o.remote.get());
  return held.pages.size() == o.keys.size();
}

void PrefixLoads::LoadArtefact(const std::shared_ptr<Opening>& o, PageTier* tier,
                               std::function<void()> then) {
  if (!WantsArtefact(*o, *tier)) return then();
  TierLoad load;
  load.keys = {o->artefact};
  load.asked = o->asked;
  load.finds = o->remote;
  load.take = [this, o](size_t, std::span<const LoadedValue> values) {
    if (values.front().size() == 1) o->record = ParseRecord(values.front().front());
    if (o->record) ledger_.Note(o->artefact, *o->record);
    return true;
  };
  load.done = [this, o, tier, then] { LoadExtents(o, tier, then); };
  if (!tier->Load(std::move(load))) then();
}

void PrefixLoads::LoadExtents(const std::shared_ptr<Opening>& o, PageTier* tier,
                              std::function<void()> then) {
  if (!o->record || o->record->prompt_tokens != o->tokens) return then();
  if (!WantsArtefact(*o, *tier)) return then();
  TierLoad load;
  load.asked = o->asked;
  load.finds = o->remote;
  // A tier that has the record has what it names: that was written before.
  const bool found = WasFound(*o, o->artefact);
  for (size_t i = 0; i < o->record->extents.size(); ++i) {
    const ArtefactRecord::Stored& extent = o->record->extents[i];
    load.keys.push_back(ExtentKey(o->artefact, i, extent));
    if (!found) continue;
    const size_t row = o->remote->values.at(o->artefact).row;
    o->remote->values[load.keys.back()] = {{AllocatedBytes(extent.bytes)}, o->artefact, row};
  }
  load.take = [this, o](size_t first, std::span<const LoadedValue> values) {
    for (const LoadedValue& value : values) {
      if (!TakeExtent(o.get(), first++, value)) return false;
    }
    return true;
  };
  load.done = [this, o, tier, then] {
    EnterLoadedArtefact(o.get(), *tier);
    then();
  };
  if (!tier->Load(std::move(load))) then();
}

bool PrefixLoads::TakeExtent(Opening* o, size_t i, const LoadedValue& value) {
  const ArtefactRecord::Stored& extent = o->record->extents[i];
  const Sequence& s = *o->sequence;
  if (value.size() != 1) return false;
  if (!VerifyExtent(extent, value.front(), s.model->desc.geometry).ok()) return false;
  Page* page = nullptr;
  {
    StoreLock lock(books_.mu);
    const Result<Session*> session = catalog_.FindSession(o->session);
    if (!session.ok()) return false;
    std::vector<Page*> taken;
    const Taker taker{(*session)->tenant, kDaemon, nullptr, s.model->id,
                      PoolsOf(**session, extent.tier)};
    if (!allocator_.Allocate(taker, value.front().size(), 1, &taken).ok()) return false;
    page = taken.front();
    page->sealed = true;
    HoldForLoad(o, page);
  }
  if (page->bytes != value.front().size()) return false;
  if (!books_.memory.Write(*page, value.front().data()).ok()) return false;
  o->extents.push_back({page, extent.bytes, extent.tokens, extent.checksum,
                        extents_.DescriptionFor(*page, value.front().first(extent.bytes))});
  return true;
}

void PrefixLoads::EnterLoadedArtefact(Opening* o, const PageTier& tier) {
  if (o->extents.size() != o->record->extents.size()) return;
  const bool stored = tier.Holds(o->artefact);
  StoreLock lock(books_.mu);
  if (books_.artefacts.Contains(o->artefact)) return;  // somebody was faster
  // All that a Recompressor needs to go on lies in the extents (codec.h).
  extents_.EnterArtefact({o->artefact, std::move(o->extents), o->sequence->codec->recompressor,
                          std::move(o->record->released), o->record->prompt_tokens,
                          std::move(o->record->series)});
  ++books_.counters.loaded_artefacts;
  if (!stored) extents_.OfferArtefact(o->artefact, OfferedFor::kLoaded);
}

}  // namespace kvstrata
