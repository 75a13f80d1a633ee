// SPDX-License-Identifier: Apache-2.0
#include "server/store/openings.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>

#include "base/check.h"
#include "kernels/plan_needs.h"
#include "server/store/books.h"
#include "server/store/leases.h"
#include "server/store/long_request.h"
#include "server/store/moves.h"
#include "server/store/page_allocator.h"
#include "server/store/page_references.h"
#include "server/store/plans.h"
#include "server/store/prefix_loads.h"
#include "server/store/raw_pages.h"
#include "server/store/recompression.h"
#include "server/store/replication.h"
#include "server/store/session_catalog.h"
#include "server/store/tables.h"

namespace kvstrata {
namespace {

// Entries of a first table beyond the pages it starts with, so that decoding extends it in place.
constexpr uint32_t kSpareEntries = 16;

uint32_t FirstCapacity(size_t pages) {
  return std::bit_ceil(static_cast<uint32_t>(pages) + kSpareEntries);
}

// A model that names the ids which end sentences needs no reports of them.
uint32_t BoundedTokens(const Sequence& s) {
  if (!s.model->desc.boundary_tokens.empty()) return s.held_tokens;
  const auto known = static_cast<uint32_t>(ReportedPages(s.pages, kNeedBoundary, s.page_tokens()));
  return std::min(known * s.page_tokens(), s.held_tokens);
}

OpenedSequence Describe(const Sequence& s) {
  return {s.id,
          s.slot,
          s.held_tokens,
          s.indexed_tokens,
          s.series.LeadingSurprisals(),
          BoundedTokens(s),
          s.plan,
          s.model->desc.geometry,
          s.model->desc.boundary_tokens,
          s.series.boundary,
          s.imported};
}

}  // namespace

Openings::Openings(Books& books, const StoreOptions& options, Plans& plans, SessionCatalog& catalog,
                   Tables& tables, PageReferences& references, PageAllocator& allocator,
                   Moves& moves, PrefixCatalog& prefixes, PrefixLoads& loads,
                   Replication& replication, Recompression& recompression, RawPages& raw_pages)
    : books_(books),
      options_(options),
      plans_(plans),
      catalog_(catalog),
      tables_(tables),
      references_(references),
      allocator_(allocator),
      moves_(moves),
      prefixes_(prefixes),
      loads_(loads),
      replication_(replication),
      recompression_(recompression),
      raw_pages_(raw_pages) {}

void Openings::LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const {
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

Status Openings::TakeForOpen(Session* session, Sequence* s, Hit hit, uint64_t cover) {
  // References first: allocation may evict what nobody uses.
  s->pages.reserve(s->PagesFor(cover));
  references_.RefAll(session, hit.pages, &s->pages);
  references_.RefAll(session, hit.index_blocks, &s->index_blocks);
  const Status status = allocator_.TakeUpTo(session, s, cover);
  if (!status.ok()) {
    references_.ReleaseAll(session, &s->index_blocks);
    references_.ReleaseAll(session, &s->pages);
  }
  return status;
}

void Openings::TakeLeasedPlace(const Tenant& tenant, Opening* o, Sequence* s) {
  const auto leases = [](const Session* session) { return !session->leases.empty(); };
  if (o->prompt.model == 0 || std::ranges::none_of(tenant.sessions, leases)) return;
  o->prompt.plan = FormatPlan(s->plan);
  TakePlaceOfLease(tenant, o->prompt, s);
}

Result<OpenedSequence> Openings::Enter(Session* session, std::unique_ptr<Sequence> s) {
  Result<UserPlace> place =
      s->place.taken.held()
          ? Result<UserPlace>(std::move(s->place.taken))
          : UserPlace::Take(options_.user_limits, session->tenant->name, Limit::kSequences);
  std::optional<uint32_t> slot;
  const Result<shm::SequenceTable*> table =
      [&]() KVS_REQUIRES(store_lock) -> Result<shm::SequenceTable*> {
    KVS_RETURN_IF_ERROR(place.status());
    slot = session->memory->TakeSlot();
    if (slot) return tables_.ReserveTable(session, *s, FirstCapacity(s->pages.size()));
    return ResourceExhausted(
        "SEQUENCE_LIMIT",
        std::to_string(shm::kMaxSequences) + " sequences are open in this session; close some");
  }();
  if (!table.ok()) {
    if (slot) session->memory->FreeSlot(*slot);
    if (place.ok()) s->place.taken = std::move(*place);
    GivePlaceBack(catalog_, s.get());
    references_.ReleaseExtents(&s->extents);
    references_.ReleaseAll(session, &s->index_blocks);
    references_.ReleaseAll(session, &s->pages);
    references_.Advance(session->tenant);
    return table.status();
  }
  s->place.taken = std::move(*place);
  s->slot = *slot;
  s->id = session->tenant->NextId(&session->tenant->sequences_made);
  s->session = session->id;
  s->opened = Clock::now();
  tables_.Publish(session, s.get(), *table);
  const OpenedSequence opened = Describe(*s);
  session->outside = nullptr;  // the maps have it now
  catalog_.EnterSequence(session, std::move(s));
  return opened;
}

void Openings::AwaitArtefact(Sequence* s, const Opening& o) {
  if (!s->codec || !s->HoldsAll(o.tokens)) return;
  if (prefixes_.FindArtefact(o.artefact, o.device) == nullptr) return;
  s->codec->awaited_prompt = static_cast<uint32_t>(o.tokens);
}

void Openings::OpenOnArtefact(Sequence* s, const Opening& o) {
  const Artefact* artefact = books_.artefacts.Find(o.artefact);
  KVS_CHECK(artefact != nullptr);
  s->extents = artefact->extents;
  for (const Extent& extent : s->extents) references_.RefPage(extent.page);
  s->series = artefact->series.Slice(0, s->held_tokens);
  CodecState& codec = *s->codec;
  codec.recompressor = artefact->recompressor;
  codec.released = artefact->released;
  codec.opened_on = artefact->prompt_tokens;
  codec.promised = o.rest;
  ++books_.counters.artefact_hits;
}

Result<Opening> Openings::PrepareOpen(uint64_t session_id, uint64_t model_id,
                                      std::string_view plan_text, std::span<const int32_t> tokens,
                                      const OpenOptions& options, Files files) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens.size()));
  KVS_RETURN_IF_ERROR(CheckLength("reserve_tokens", options.reserve_tokens));
  const Clock::time_point begun = Clock::now();
  KVS_ASSIGN_OR_RETURN(
      Opening o, BeginOpening(&books_.mu, &catalog_, plans_, session_id, model_id, plan_text));
  Sequence* const s = o.sequence.get();
  KVS_ASSIGN_OR_RETURN(s->codec, plans_.NewCodec(s->plan, s->model->desc.geometry, files));
  o.tokens = tokens.size();
  o.reserve_tokens = options.reserve_tokens;
  // Hashing costs as much as all the rest: never under the lock.
  PromptKeys keys;  // none: what has no keys finds nothing, and asks no tier
  if (options.private_pages) {
    MakePrivate(s);
  } else {
    keys = KeysOf(s->chain, s->page_tokens(), s->plan,
                  s->codec ? &s->codec->parameters_digest : nullptr, tokens);
  }
  const size_t usable = keys.pages.size();
  if (usable != 0) {
    const std::span<const int32_t> behind = tokens.subspan(usable * s->page_tokens());
    o.prompt = {model_id, "", keys.pages.back(), {behind.begin(), behind.end()}};
  }
  o.limits = options.hold;
  o.keys = std::move(keys.pages);
  o.keys.resize(o.limits.Pages(usable, s->page_tokens()));
  // An artefact is of a prompt that is held whole.
  if (o.keys.size() == usable) o.artefact = keys.artefact;
  const std::span<const int32_t> rest = tokens.subspan(o.keys.size() * s->page_tokens());
  o.rest.assign(rest.begin(), rest.end());
  o.times.begun = begun;
  o.times.prepared = Clock::now();
  return o;
}

Result<OpenedSequence> Openings::FinishOpen(Opening* o) {
  o->times.loaded = Clock::now();
  o->times.disk_values = static_cast<uint32_t>(o->loads_index.size());
  const Sequence& s = *o->sequence;
  const bool raw = !s.codec || s.plan.stored.keep_raw != KeepRaw::kNo;
  const bool reusable = raw && !s.model->OfOneSession();
  const IndexLayout index = s.index;
  const Result<OpenedSequence> opened = FinishOpenUnderLock(o);
  if (opened.ok() && reusable) OfferReused(*o, index, *opened);
  return opened;
}

Result<OpenedSequence> Openings::FinishOpenUnderLock(Opening* o) {
  StoreLock lock(books_.mu);
  const Result<Session*> session = catalog_.FindSession(o->session);
  if (!session.ok()) {
    loads_.EndLoad(nullptr, o);
    return session.status();
  }
  const LongRequest request(&catalog_, *session);
  Result<OpenedSequence> opened = FinishOpenLocked(*session, o);
  loads_.EndLoad(*session, o);
  o->times.published = Clock::now();
  if (opened.ok()) opened->times = o->times;
  return opened;
}

void Openings::OfferReused(const Opening& o, const IndexLayout& index,
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

Result<OpenedSequence> Openings::FinishOpenLocked(Session* session, Opening* o) {
  references_.DropLost();
  const std::optional<RawFree> artefact =
      prefixes_.RawFreeBy(o->sequence->plan, o->artefact, o->device);
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
  if (!hit.whole && prefixes_.FindArtefact(o->artefact, o->device) == nullptr) {
    hit = prefixes_.FindPrefix(question, std::nullopt, o->device, hold);
  }
  LimitHit(*o, *s, &hit);
  o->times.found = Clock::now();
  s->tokens = s->held_tokens = static_cast<uint32_t>(hit.pages.size()) * s->page_tokens();
  if (!hit.pages.empty()) s->last_key = o->keys[hit.pages.size() - 1];
  for (size_t i = 0; i < hit.pages.size(); i += kGroupPages) s->groups.push_back(o->keys[i]);
  if (!hit.whole) OpenOnArtefact(s.get(), *o);
  for (size_t i = 0; i < hit.pages.size(); ++i) {
    const Series* const series = hit.pages[i] == nullptr ? nullptr : hit.pages[i]->series.get();
    if (series != nullptr) s->series.Put(static_cast<uint32_t>(i) * s->page_tokens(), *series);
    catalog_.LetOthersIn(session, 1);
  }
  s->indexed_tokens =
      static_cast<uint32_t>(hit.index_blocks.size()) * static_cast<uint32_t>(s->index.block_tokens);
  const uint64_t ahead =
      std::min<uint64_t>(o->tokens + options_.headroom_tokens, kMaxSequenceTokens);
  const uint64_t cover = o->limits.only_held ? 0 : std::max<uint64_t>(ahead, o->reserve_tokens);
  s->session = session->id;
  AwaitArtefact(s.get(), *o);
  if (const Status status = TakeForOpen(session, s.get(), std::move(hit), cover); !status.ok()) {
    references_.ReleaseExtents(&s->extents);
    references_.Advance(session->tenant);
    return status;
  }
  if (s->codec && s->codec->opened_on != 0) {
    books_.counters.released_bytes += raw_pages_.GiveBack(s.get(), ReleasedPages(*s));
  }
  const uint64_t held = s->held_tokens;
  TakeLeasedPlace(*session->tenant, o, s.get());
  Result<OpenedSequence> opened = Enter(session, std::move(s));
  if (opened.ok() && !o->limits.only_held) {
    recompression_.NoteDue(catalog_.SequenceOf(opened->sequence));
    moves_.NotePromotion(session, *catalog_.SequenceOf(opened->sequence));
    books_.counters.lookup_tokens += o->tokens;
    books_.counters.lookup_hit_tokens += held;
  }
  return opened;
}

Result<OpenedSequence> Openings::OpenSequence(uint64_t session, uint64_t model,
                                              std::string_view plan,
                                              std::span<const int32_t> tokens,
                                              const OpenOptions& options) {
  KVS_ASSIGN_OR_RETURN(Opening o, PrepareOpen(session, model, plan, tokens, options, Files::kRead));
  replication_.Replicate(&o);
  return FinishOpen(&o);
}

void Openings::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                            std::span<const int32_t> tokens, OpenDone done,
                            const OpenOptions& options) {
  const std::function<void(std::function<void()>)> post = replication_.SlowOpens();
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

void Openings::GoOnOpening(Result<Opening> prepared, const OpenDone& done) {
  if (!prepared.ok()) return done(prepared.status());
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    tier = prefixes_.tier();
  }
  const auto o = std::make_shared<Opening>(std::move(*prepared));
  if (tier == nullptr) return ReplicateAndFinish(o, done);
  o->asked = Clock::now();
  loads_.SearchRemote(o, tier, [this, o, tier, done] {
    try {
      LoadAndFinish(o, tier, done);
    } catch (const std::bad_alloc&) {
      done(ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence"));
    }
  });
}

void Openings::ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done) {
  replication_.GoOn(*o, [this, o, done] {
    Result<OpenedSequence> opened =
        ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence");
    try {
      replication_.Replicate(o.get());
      opened = FinishOpen(o.get());
    } catch (const std::bad_alloc&) {
      // In threads that have no request to answer; he who asked hears it here.
    }
    done(opened);
  });
}

void Openings::LoadAndFinish(const std::shared_ptr<Opening>& o, PageTier* tier,
                             const OpenDone& done) {
  loads_.LoadArtefact(o, tier, [this, o, tier, done] {
    try {
      loads_.LoadPrefix(o, tier, [this, o, done] { ReplicateAndFinish(o, done); });
    } catch (const std::bad_alloc&) {
      done(ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence"));
    }
  });
}

}  // namespace kvstrata
