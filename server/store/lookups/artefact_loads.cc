// SPDX-License-Identifier: Apache-2.0
// Artefacts from the tier below, when a sequence opens. Written they are as pages are
// (sealed_values.h).
#include <utility>

#include "kernels/codec/codec.h"
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

// Nobody waits for the rest: a tier may take so much longer.
constexpr std::chrono::seconds kNoLonger{0}, kRestTime{60};

bool IsOfPairs(const ArtefactRecord& record) {
  const std::span<const ArtefactRecord::Stored> extents = record.extents;
  bool pairs = extents.size() % 2 == 0;
  for (size_t i = 0; pairs && i < extents.size(); i += 2) {
    pairs = extents[i].tokens == extents[i + 1].tokens;
  }
  return pairs && !extents.empty();
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
  const bool all = !OpensBeforeRest(*o);
  for (size_t i = 1; !all && i < o->record->extents.size(); i += 2) {
    Page* const page = TakeExtentPage(o.get(), i);
    if (page == nullptr) return then();
    o->later.push_back(page);
  }
  const bool reads =
      ReadExtents(o, tier, {0, all ? size_t{1} : size_t{2}, kNoLonger}, [this, o, tier, then] {
        EnterLoadedArtefact(o.get(), *tier);
        then();
      });
  if (!reads) then();
}

bool PrefixLoads::OpensBeforeRest(const Opening& o) const {
  const Plan& plan = o.sequence->plan;
  const Codec& codec = CodecOf(plan);
  return codec.rest_waits != nullptr && codec.rest_waits(plan) && prefixes_.OpensWithoutRaw(plan) &&
         !o.limits.only_held && IsOfPairs(*o.record);
}

bool PrefixLoads::LoadRest(const std::shared_ptr<Opening>& o, PageTier* tier,
                           std::function<void()> done) {
  return ReadExtents(o, tier, {1, 2, kRestTime}, std::move(done));
}

bool PrefixLoads::ReadExtents(const std::shared_ptr<Opening>& o, PageTier* tier, const Part& part,
                              std::function<void()> done) {
  TierLoad load;
  load.asked = part.longer == kNoLonger ? o->asked : Clock::now();
  load.longer = part.longer;
  load.finds = o->remote;
  // A tier that has the record has what it names: that was written before.
  const bool found = WasFound(*o, o->artefact);
  for (size_t i = part.first; i < o->record->extents.size(); i += part.step) {
    const ArtefactRecord::Stored& extent = o->record->extents[i];
    load.keys.push_back(ExtentKey(o->artefact, i, extent));
    if (!found) continue;
    const size_t row = o->remote->values.at(o->artefact).row;
    o->remote->values[load.keys.back()] = {{AllocatedBytes(extent.bytes)}, o->artefact, row};
  }
  load.take = [this, o, part](size_t first, std::span<const LoadedValue> values) {
    for (const LoadedValue& value : values) {
      if (!TakeExtent(o.get(), part.first + part.step * first++, value)) return false;
    }
    return true;
  };
  load.done = std::move(done);
  return tier->Load(std::move(load));
}

Page* PrefixLoads::TakeExtentPage(Opening* o, size_t i) {
  const ArtefactRecord::Stored& extent = o->record->extents[i];
  StoreLock lock(books_.mu);
  const Result<Session*> session = catalog_.FindSession(o->session);
  if (!session.ok()) return nullptr;
  std::vector<Page*> taken;
  const Taker taker{(*session)->tenant, kDaemon, nullptr, o->model->id,
                    PoolsOf(**session, extent.tier)};
  if (!allocator_.Allocate(taker, AllocatedBytes(extent.bytes), 1, &taken).ok()) return nullptr;
  taken.front()->sealed = true;
  HoldForLoad(o, taken.front());
  return taken.front();
}

bool PrefixLoads::TakeExtent(Opening* o, size_t i, const LoadedValue& value) {
  const ArtefactRecord::Stored& extent = o->record->extents[i];
  if (value.size() != 1 || value.front().size() != AllocatedBytes(extent.bytes)) return false;
  Page* const page = o->upper ? o->later[i / 2] : TakeExtentPage(o, i);
  if (page == nullptr) return false;
  const auto copy = [&, at = uint64_t{0}](std::span<const std::byte> piece) mutable {
    return books_.memory.Write(*page, std::exchange(at, at + piece.size()), piece);
  };
  if (!CopyVerified(extent, value.front(), o->model->desc.geometry, copy).ok()) return false;
  o->extents.push_back({page, extent.bytes, extent.tokens, extent.checksum,
                        extents_.DescriptionFor(*page, value.front().first(extent.bytes))});
  return true;
}

void PrefixLoads::EnterLoadedArtefact(Opening* o, const PageTier& tier) {
  ArtefactRecord& record = *o->record;
  if (o->extents.size() + o->later.size() != record.extents.size()) return;
  // All that a Recompressor needs to go on lies in the extents (codec.h).
  Artefact artefact{
      o->artefact,     std::exchange(o->extents, {}), o->sequence->codec->recompressor,
      record.released, record.prompt_tokens,          record.series};
  if (!o->later.empty()) {
    o->upper = std::move(artefact);
    return;
  }
  const bool stored = tier.Holds(o->artefact);
  StoreLock lock(books_.mu);
  EnterLoaded(artefact, stored);
}

void PrefixLoads::EnterLoaded(const Artefact& artefact, bool stored) {
  if (books_.artefacts.Contains(artefact.key)) return;  // somebody was faster
  extents_.EnterArtefact(artefact);
  ++books_.counters.loaded_artefacts;
  if (!stored) extents_.OfferArtefact(artefact.key, OfferedFor::kLoaded);
}

const Artefact* PrefixLoads::ArtefactOf(const Opening& o) const {
  const Artefact* const entered = prefixes_.FindArtefact(o.artefact, o.device);
  return entered == nullptr && o.upper ? &*o.upper : entered;
}

}  // namespace kvstrata
