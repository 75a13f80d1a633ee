// SPDX-License-Identifier: Apache-2.0
#include "server/store/openings/opening_ends.h"

#include <algorithm>
#include <utility>

#include "kernels/plan/plan_needs.h"
#include "server/store/books/books.h"
#include "server/store/codecs/recompression.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/pages/hold_limits.h"
#include "server/store/pages/page_tier.h"
#include "server/store/prompts/held_prefix.h"
#include "server/store/prompts/prefix_survey.h"
#include "server/store/references/page_references.h"
#include "server/store/sequences/sequence_entry.h"
#include "server/store/space/moves.h"

namespace kvstrata {
namespace {

// Gives `s`, which is nobody's yet, the place of a lease of that prompt, if there is one that has
// it. Cost: a look-up for each session of the tenant that has leases.
void TakePlaceOfLease(const Tenant& tenant, const LeasedPrompt& prompt, Sequence* s) {
  for (const Session* session : tenant.sessions) {
    const auto lease = session->leases.find(prompt);
    if (lease == session->leases.end()) continue;
    const auto found = session->sequences.find(lease->second.sequence);
    if (found == session->sequences.end() || !found->second->place.taken.held()) continue;
    s->place.taken = std::move(found->second->place.taken);
    s->place.lease = found->first;
    return;
  }
}

}  // namespace

Result<OpenedSequence> OpeningEnds::Finish(Opening* o) {
  o->times.loaded = Clock::now();
  o->times.disk_values = static_cast<uint32_t>(o->loads_index.size());
  const Sequence& s = *o->sequence;
  const bool raw = !s.codec || s.plan.stored.keep_raw != KeepRaw::kNo;
  const bool reusable = raw && !s.model->OfOneSession();
  const IndexLayout index = s.index;
  const Result<OpenedSequence> opened = FinishUnderLock(o);
  if (opened.ok() && reusable) OfferReused(*o, index, *opened);
  return opened;
}

Result<OpenedSequence> OpeningEnds::FinishUnderLock(Opening* o) {
  StoreLock lock(books_.mu);
  const Result<Session*> session = catalog_.FindSession(o->session);
  if (!session.ok()) {
    loads_.EndLoad(nullptr, o);
    return session.status();
  }
  const LongRequest request(&catalog_, *session);
  Result<OpenedSequence> opened = FinishLocked(*session, o);
  if (!o->awaits_rest) loads_.EndLoad(*session, o);
  o->times.published = Clock::now();
  if (opened.ok()) opened->times = o->times;
  return opened;
}

void OpeningEnds::OfferReused(const Opening& o, const IndexLayout& index,
                              const OpenedSequence& opened) {
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    if (prefixes_.remote_min_tokens()) tier = prefixes_.tier();
  }
  if (tier == nullptr) return;
  const auto page_tokens = static_cast<uint32_t>(opened.geometry.page_tokens);
  const auto page_bytes = static_cast<uint64_t>(opened.geometry.page_bytes());
  const PrefixShape shape(o.keys.size(), page_tokens, index);
  const size_t blocks =
      shape.block_pages == 0 ? 0 : opened.indexed_tokens / (shape.block_pages * page_tokens);
  for (size_t i = 0; i < opened.held_tokens / page_tokens; ++i) {
    const PageKey& place = o.keys[GroupBegin(i)];
    tier->Offer({o.keys[i], place, page_bytes, OfferedFor::kReused, o.tenant});
    if (shape.block_pages == 0 || (i + 1) % shape.block_pages != 0) continue;
    if ((i + 1) / shape.block_pages > blocks) continue;
    tier->Offer({IndexBlockKey(o.keys[i], index), place, static_cast<uint64_t>(index.block_bytes),
                 OfferedFor::kReused, o.tenant});
  }
}

Result<OpenedSequence> OpeningEnds::FinishLocked(Session* session, Opening* o) {
  references_.DropLost();
  const std::optional<RawFree> artefact =
      prefixes_.RawFreeBy(o->sequence->plan, loads_.ArtefactOf(*o));
  const PrefixQuestion question = o->question();
  std::unique_ptr<Sequence> s = std::move(o->sequence);
  const Outside outside(session, s.get());
  // Held at once: others are let in.
  const auto hold = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    loads_.HoldForLoad(o, page);
    catalog_.LetOthersIn(session, 1);
  };
  Hit hit = prefixes_.FindPrefix(question, artefact, o->device, hold);
  // Others were let in, and may have evicted it.
  if (!hit.whole && loads_.ArtefactOf(*o) == nullptr) {
    hit = prefixes_.FindPrefix(question, std::nullopt, o->device, hold);
  }
  LimitHit(*o, *s, &hit);
  o->times.found = Clock::now();
  s->tokens = s->held_tokens = static_cast<uint32_t>(hit.pages.size()) * s->page_tokens();
  if (!hit.pages.empty()) s->last_key = o->keys[hit.pages.size() - 1];
  for (size_t i = 0; i < hit.pages.size(); i += kGroupPages) s->groups.push_back(o->keys[i]);
  if (!hit.whole) entry_.OpenOnArtefact(s.get(), *o);
  for (size_t i = 0; i < hit.pages.size(); ++i) {
    const Series* const series = hit.pages[i] == nullptr ? nullptr : hit.pages[i]->series.get();
    if (series != nullptr) s->series.Put(static_cast<uint32_t>(i) * s->page_tokens(), *series);
    catalog_.LetOthersIn(session, 1);
  }
  s->indexed_tokens =
      static_cast<uint32_t>(hit.index_blocks.size()) * static_cast<uint32_t>(s->index.block_tokens);
  s->session = session->id;
  AwaitArtefact(s.get(), *o);
  KVS_RETURN_IF_ERROR(entry_.Take(session, s.get(), std::move(hit), *o));
  const uint64_t held = s->held_tokens;
  TakeLeasedPlace(*session->tenant, o, s.get());
  const bool awaits_rest = s->codec && s->codec->rest_load != 0;
  Result<OpenedSequence> opened = entry_.Enter(session, std::move(s));
  o->awaits_rest = opened.ok() && awaits_rest;
  if (opened.ok() && !o->limits.only_held) {
    recompression_.NoteDue(catalog_.SequenceOf(opened->sequence));
    moves_.NotePromotion(session, *catalog_.SequenceOf(opened->sequence));
    books_.counters.lookup_tokens += o->tokens;
    books_.counters.lookup_hit_tokens += held;
  }
  return opened;
}

void OpeningEnds::LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const {
  if (!o.limits.only_reported || !hit->whole) return;
  const bool made = prefixes_.FindArtefact(o.artefact, o.device) != nullptr;
  if (made && hit->pages.size() == o.keys.size()) return;
  uint32_t needs = NeedsOf(shape.plan);
  if (!shape.model->desc.boundary_tokens.empty()) needs &= ~uint32_t{kNeedBoundary};
  hit->pages.resize(ReportedPages(hit->pages, needs, shape.page_tokens()));
  if (!shape.SharesIndex()) return;
  const size_t blocks =
      hit->pages.size() * shape.page_tokens() / static_cast<size_t>(shape.index.block_tokens);
  if (blocks < hit->index_blocks.size()) hit->index_blocks.resize(blocks);
}

void OpeningEnds::AwaitArtefact(Sequence* s, const Opening& o) {
  if (!s->codec || !s->HoldsAll(o.tokens)) return;
  if (prefixes_.FindArtefact(o.artefact, o.device) == nullptr) return;
  s->codec->awaited_prompt = static_cast<uint32_t>(o.tokens);
}

void OpeningEnds::TakeLeasedPlace(const Tenant& tenant, Opening* o, Sequence* s) {
  const auto leases = [](const Session* session) { return !session->leases.empty(); };
  if (o->prompt.model == 0 || std::ranges::none_of(tenant.sessions, leases)) return;
  o->prompt.plan = FormatPlan(s->plan);
  TakePlaceOfLease(tenant, o->prompt, s);
}

}  // namespace kvstrata
