// The beginning and the end of a sequence: prefix, first pages and table; fork; close.
#include <algorithm>
#include <bit>
#include <string>

#include "base/check.h"
#include "kernels/plan_needs.h"
#include "server/store/long_request.h"

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

void Store::Impl::LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const {
  if (!o.limits.only_reported || !hit->whole) return;
  const bool made = FindArtefact(o.artefact, o.device) != nullptr;
  if (made && hit->pages.size() == o.keys.size()) return;
  uint32_t needs = NeedsOf(shape.plan);
  if (!shape.model->desc.boundary_tokens.empty()) needs &= ~uint32_t{kNeedBoundary};
  hit->pages.resize(ReportedPages(hit->pages, needs, shape.page_tokens()));
  if (!shape.SharesIndex()) return;
  const size_t blocks =
      hit->pages.size() * shape.page_tokens() / static_cast<size_t>(shape.index.block_tokens);
  if (blocks < hit->index_blocks.size()) hit->index_blocks.resize(blocks);
}

void Store::Impl::RefAll(Session* session, std::span<Page* const> from, std::vector<Page*>* to) {
  to->reserve(from.size());
  for (Page* page : from) {
    if (page != nullptr) RefPage(page);
    to->push_back(page);
    LetOthersIn(session, 1);
  }
}

Status Store::Impl::TakeForOpen(Session* session, Sequence* s, Hit hit, uint64_t cover) {
  // References first: allocation may evict what nobody uses.
  s->pages.reserve(s->PagesFor(cover));
  RefAll(session, hit.pages, &s->pages);
  RefAll(session, hit.index_blocks, &s->index_blocks);
  const Status status = TakeUpTo(session, s, cover);
  if (!status.ok()) {
    ReleaseAll(session, &s->index_blocks);
    ReleaseAll(session, &s->pages);
  }
  return status;
}

Result<OpenedSequence> Store::Impl::Enter(Session* session, std::unique_ptr<Sequence> s) {
  Result<UserPlace> place = UserPlace::Take(user_limits_, session->tenant->name, Limit::kSequences);
  std::optional<uint32_t> slot;
  const Result<shm::SequenceTable*> table = [&]() -> Result<shm::SequenceTable*> {
    KVS_RETURN_IF_ERROR(place.status());
    slot = session->memory->TakeSlot();
    if (slot) return ReserveTable(session, *s, FirstCapacity(s->pages.size()));
    return ResourceExhausted(
        "SEQUENCE_LIMIT",
        std::to_string(shm::kMaxSequences) + " sequences are open in this session; close some");
  }();
  if (!table.ok()) {
    if (slot) session->memory->FreeSlot(*slot);
    ReleaseExtents(&s->extents);
    ReleaseAll(session, &s->index_blocks);
    ReleaseAll(session, &s->pages);
    Advance(session->tenant);
    return table.status();
  }
  s->place = std::move(*place);
  s->slot = *slot;
  s->id = session->tenant->NextId(&session->tenant->sequences_made);
  s->session = session->id;
  s->opened = Clock::now();
  Publish(session, s.get(), *table);
  const OpenedSequence opened = Describe(*s);
  session->outside = nullptr;  // the maps have it now
  sequences_.emplace(s->id, s.get());
  session->sequences.emplace(s->id, std::move(s));
  return opened;
}

Result<Plan> Store::Impl::PlanFor(const Plan& named, const Geometry& geometry) const {
  const Plan plan = WithMinTokens(named, geometry, options_.steps_on);
  KVS_RETURN_IF_ERROR(CheckGeometry(plan, geometry));
  if (options_.serves) KVS_RETURN_IF_ERROR(options_.serves(plan, geometry));
  return plan;
}

Result<std::optional<CodecState>> Store::Impl::NewCodec(const Plan& plan, const Geometry& geometry,
                                                        Files files) {
  if (!options_.new_recompressor) return std::optional<CodecState>();
  KVS_ASSIGN_OR_RETURN(Parameters parameters, parameters_.Get(plan, geometry, files));
  std::unique_ptr<Recompressor> recompressor =
      options_.new_recompressor(plan, geometry, std::move(parameters.values));
  if (recompressor == nullptr) return std::optional<CodecState>();
  CodecState codec;
  codec.recompressor = std::move(recompressor);
  codec.parameters_digest = std::move(parameters.digest);
  return std::optional<CodecState>(std::move(codec));
}

void Store::Impl::AwaitArtefact(Sequence* s, const Opening& o) {
  if (!s->codec || !s->HoldsAll(o.tokens)) return;
  if (FindArtefact(o.artefact, o.device) == nullptr) return;
  s->codec->awaited_prompt = static_cast<uint32_t>(o.tokens);
}

void Store::Impl::OpenOnArtefact(Sequence* s, const Opening& o) {
  const Artefact* artefact = artefacts_.Find(o.artefact);
  KVS_CHECK(artefact != nullptr);
  s->extents = artefact->extents;
  for (const Extent& extent : s->extents) RefPage(extent.page);
  s->series = artefact->series.Slice(0, s->held_tokens);
  CodecState& codec = *s->codec;
  codec.recompressor = artefact->recompressor;
  codec.released = artefact->released;
  codec.opened_on = artefact->prompt_tokens;
  codec.promised = o.rest;
  ++counters_.artefact_hits;
}

Result<Store::Impl::Opening> Store::Impl::BeginOpening(uint64_t session_id, uint64_t model_id,
                                                       std::string_view plan_text) {
  KVS_ASSIGN_OR_RETURN(const Plan named, ResolvePlan(plan_text));
  auto s = std::make_unique<Sequence>();
  Opening o;
  {
    MutexLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
    o.device = session->device;
    KVS_ASSIGN_OR_RETURN(const Session::KnownModel* known, FindModel(*session, model_id));
    s->model = known->first;
    s->chain = known->second;
    s->imported = session->imports.contains(model_id);
    o.tenant = session->tenant->name;
  }
  KVS_ASSIGN_OR_RETURN(s->plan, PlanFor(named, s->model->desc.geometry));
  s->index = IndexOf(s->plan, s->model->desc.geometry);
  o.session = session_id;
  o.sequence = std::move(s);
  return o;
}

Result<Store::Impl::Opening> Store::Impl::PrepareOpen(uint64_t session_id, uint64_t model_id,
                                                      std::string_view plan_text,
                                                      std::span<const int32_t> tokens,
                                                      const OpenOptions& options, Files files) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens.size()));
  KVS_RETURN_IF_ERROR(CheckLength("reserve_tokens", options.reserve_tokens));
  KVS_ASSIGN_OR_RETURN(Opening o, BeginOpening(session_id, model_id, plan_text));
  Sequence* const s = o.sequence.get();
  KVS_ASSIGN_OR_RETURN(s->codec, NewCodec(s->plan, s->model->desc.geometry, files));
  o.tokens = tokens.size();
  o.reserve_tokens = options.reserve_tokens;
  // Hashing costs as much as all the rest: never under the lock.
  PromptKeys keys = KeysOf(s->chain, s->page_tokens(), s->plan,
                           s->codec ? &s->codec->parameters_digest : nullptr, tokens);
  const size_t usable = keys.pages.size();
  o.limits = options.hold;
  o.keys = std::move(keys.pages);
  o.keys.resize(o.limits.Pages(usable, s->page_tokens()));
  // An artefact is of a prompt that is held whole.
  if (o.keys.size() == usable) o.artefact = keys.artefact;
  const std::span<const int32_t> rest = tokens.subspan(o.keys.size() * s->page_tokens());
  o.rest.assign(rest.begin(), rest.end());
  return o;
}

Result<OpenedSequence> Store::Impl::FinishOpen(Opening* o) {
  MutexLock lock(mu_);
  const Result<Session*> session = FindSession(o->session);
  if (!session.ok()) {
    EndLoad(nullptr, o);
    return session.status();
  }
  const LongRequest request(this, *session);
  Result<OpenedSequence> opened = FinishOpenLocked(*session, o);
  EndLoad(*session, o);
  return opened;
}

Result<OpenedSequence> Store::Impl::FinishOpenLocked(Session* session, Opening* o) {
  DropLost();
  const std::optional<RawFree> artefact = RawFreeBy(o->sequence->plan, o->artefact, o->device);
  const PrefixQuestion question = o->question();
  std::unique_ptr<Sequence> s = std::move(o->sequence);
  const Outside outside(session, s.get());
  // Held at once: others are let in.
  const auto hold = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    HoldForLoad(o, page);
    LetOthersIn(session, 1);
  };
  Hit hit = FindPrefix(question, artefact, o->device, hold);
  // Others were let in, and may have evicted it.
  if (!hit.whole && FindArtefact(o->artefact, o->device) == nullptr) {
    hit = FindPrefix(question, std::nullopt, o->device, hold);
  }
  LimitHit(*o, *s, &hit);
  s->tokens = s->held_tokens = static_cast<uint32_t>(hit.pages.size()) * s->page_tokens();
  if (!hit.pages.empty()) s->last_key = o->keys[hit.pages.size() - 1];
  if (!hit.whole) OpenOnArtefact(s.get(), *o);
  for (size_t i = 0; i < hit.pages.size(); ++i) {
    const Series* const series = hit.pages[i] == nullptr ? nullptr : hit.pages[i]->series.get();
    if (series != nullptr) s->series.Put(static_cast<uint32_t>(i) * s->page_tokens(), *series);
    LetOthersIn(session, 1);
  }
  s->indexed_tokens =
      static_cast<uint32_t>(hit.index_blocks.size()) * static_cast<uint32_t>(s->index.block_tokens);
  const uint64_t ahead =
      std::min<uint64_t>(o->tokens + options_.headroom_tokens, kMaxSequenceTokens);
  const uint64_t cover = o->limits.only_held ? 0 : std::max<uint64_t>(ahead, o->reserve_tokens);
  s->session = session->id;
  AwaitArtefact(s.get(), *o);
  if (const Status status = TakeForOpen(session, s.get(), std::move(hit), cover); !status.ok()) {
    ReleaseExtents(&s->extents);
    Advance(session->tenant);
    return status;
  }
  if (s->codec && s->codec->opened_on != 0) {
    counters_.released_bytes += GiveBack(s.get(), ReleasedPages(*s));
  }
  const uint64_t held = s->held_tokens;
  Result<OpenedSequence> opened = Enter(session, std::move(s));
  if (opened.ok() && !o->limits.only_held) {
    NoteDue(sequences_.at(opened->sequence));
    NotePromotion(session, *sequences_.at(opened->sequence));
    counters_.lookup_tokens += o->tokens;
    counters_.lookup_hit_tokens += held;
  }
  return opened;
}

Result<OpenedSequence> Store::Impl::OpenSequence(uint64_t session, uint64_t model,
                                                 std::string_view plan,
                                                 std::span<const int32_t> tokens,
                                                 const OpenOptions& options) {
  KVS_ASSIGN_OR_RETURN(Opening o, PrepareOpen(session, model, plan, tokens, options, Files::kRead));
  Replicate(&o);
  return FinishOpen(&o);
}

Result<OpenedSequence> Store::Impl::ForkSequence(uint64_t session_id, uint64_t sequence) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(Sequence * parent, FindSequence(session_id, sequence));
  KVS_RETURN_IF_ERROR(CheckOwned(*parent));
  KVS_RETURN_IF_ERROR(CheckHeld(*parent));
  // The parent's table must say that its tail is shared now: reserved before anything changes.
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * parent_table,
                       ReserveTable(session, *parent, parent->table->page_capacity));
  const LongRequest request(this, session);
  auto child = std::make_unique<Sequence>(*parent);
  child->key.clear();
  child->truncate_to.reset();
  child->table = nullptr;
  child->version = 0;
  child->heat = {};
  child->recall = nullptr;
  child->held_tokens = parent->tokens;
  if (child->codec) child->codec->OnFork();
  // Pages ahead of the tokens stay the parent's; all index blocks that may have rows are shared.
  const size_t pages = std::min<size_t>(parent->pages.size(), parent->PagesFor(parent->tokens));
  const size_t blocks =
      std::min<size_t>(parent->index_blocks.size(), parent->BlocksFor(parent->tokens));
  child->pages.clear();
  child->index_blocks.clear();
  for (const Extent& extent : child->extents) RefPage(extent.page);
  Result<OpenedSequence> opened = [&]() KVS_REQUIRES(mu_) {
    const Outside outside(session, child.get());
    RefAll(session, std::span(parent->pages).first(pages), &child->pages);
    RefAll(session, std::span(parent->index_blocks).first(blocks), &child->index_blocks);
    return Enter(session, std::move(child));
  }();
  if (opened.ok()) {
    Publish(session, parent, parent_table);
    NoteDue(sequences_.at(opened->sequence));
  } else {
    session->memory->FreeTable(parent_table);
  }
  Advance(session->tenant);
  return opened;
}

void Store::Impl::CloseLocked(Session* session, Sequence* s) {
  requests_->EndBuildLocked(
      s->id, Status(Code::kAborted, "SEQUENCE_CLOSED",
                    "sequence " + std::to_string(s->id) + " was closed while it was built for"));
  if (s->codec) {
    s->codec->cancelled->store(true, std::memory_order_relaxed);
    if (sink_ != nullptr) sink_->Withdraw(s->id);
    AnswerWaiters(s, Status(Code::kAborted, "SEQUENCE_CLOSED",
                            "sequence " + std::to_string(s->id) + " was closed meanwhile"));
  }
  StopRecall(s, Status(Code::kAborted, "SEQUENCE_CLOSED",
                       "sequence " + std::to_string(s->id) + " was closed by its client"));
  NoteSelected(*session, *s);
  if (!s->key.empty()) session->tenant->keys.erase(s->key);
  Unpublish(session, s);
  // Nobody finds it any more: what follows is done in pieces.
  const Outside outside(session, s);
  sequences_.erase(s->id);
  const auto leaving = session->sequences.extract(s->id);
  // No look-up gets past a page that was given back, unless by the prompt's artefact: what lies
  // behind it would be cached in vain.
  const bool artefact = s->codec && artefacts_.Contains(s->codec->prompt_key);
  const auto hole =
      artefact ? s->pages.end() : std::find(s->pages.begin(), s->pages.end(), nullptr);
  for (const size_t kept = static_cast<size_t>(hole - s->pages.begin()); s->pages.size() > kept;
       LetOthersIn(session, 1)) {
    if (s->pages.back() != nullptr) DropRaw(s->pages.back());
    s->pages.pop_back();
  }
  OfferKept(*s);
  ReleaseExtents(&s->extents);
  ReleaseAll(session, &s->index_blocks);
  ReleaseAll(session, &s->pages);
}

Status Store::Impl::CloseSequence(uint64_t session_id, uint64_t sequence) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Sequence * s, FindSequence(session_id, sequence));
  Session* session = sessions_.at(session_id).get();
  const LongRequest request(this, session);
  CloseLocked(session, s);
  Advance(session->tenant);
  // What comes back now is still in the caches, for the next sequence.
  ReclaimByPieces(session->tenant);
  NoteFill();
  return OkStatus();
}

}  // namespace kvstrata
