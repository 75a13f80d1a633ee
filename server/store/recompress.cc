// Recompression (recompress_job.h): what is due, what a worker gets, how its extents are published,
// who waits for it, and what a prompt's extents are to the next sequence with the same one.
#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/store/long_request.h"

namespace kvstrata {
namespace {

using Work = CodecState::Work;

constexpr double kWatermark = 0.8;       // of the device pool
constexpr uint32_t kLongestBackoff = 6;  // 2^6 times options.recompress_retry

// The codec is our own code, but what it drafts becomes what clients read.
Status CheckDrafts(const RecompressOutput& output, size_t extents) {
  int32_t begin = 0;
  std::vector<bool> kept(extents);
  for (const ExtentDraft& draft : output.extents) {
    bool sound = draft.tokens.begin >= begin && draft.tokens.end >= draft.tokens.begin;
    if (draft.kept >= 0) {
      const auto i = static_cast<size_t>(draft.kept);
      sound = sound && i < extents && !kept[i] && draft.bytes.empty();
      if (sound) kept[i] = true;
    } else {
      sound = sound && draft.kept == -1 && !draft.bytes.empty();
    }
    if (!sound) {
      return Internal("DRAFT_INVALID", "a codec drafted an extent of tokens " +
                                           std::to_string(draft.tokens.begin) + " to " +
                                           std::to_string(draft.tokens.end) +
                                           " out of order, empty, or kept twice");
    }
    begin = draft.tokens.begin;
  }
  return OkStatus();
}

std::vector<Run> Union(const std::vector<Run>& a, const std::vector<Run>& b) {
  std::vector<Run> all = a;
  all.insert(all.end(), b.begin(), b.end());
  return Normalize(std::move(all));
}

Status RunCancelled() {
  return {Code::kAborted, "CANCELLED", "recompression was cancelled; nothing has changed"};
}

uint64_t MicrosSince(Clock::time_point since) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since).count());
}

}  // namespace

// --- what is due ---------------------------------------------------------------------------------

// Until all of the prompt is recompressed, what was decoded since is not shown: an artefact of the
// prompt is then the same whenever the worker comes.
RecompressInput Store::Impl::InputOf(const Sequence& s) {
  const CodecState& codec = *s.codec;
  const uint32_t tokens = s.prefill_done && !codec.prompt_settled ? s.prompt_tokens : s.tokens;
  RecompressInput input;
  input.view.pages = codec.pages.data();
  input.view.tokens = static_cast<int32_t>(tokens);
  input.view.extents = codec.extents.data();
  input.view.extent_count = static_cast<int32_t>(codec.extents.size());
  input.view.version = s.version;
  input.prompt_tokens = s.prefill_done ? static_cast<int32_t>(s.prompt_tokens) : -1;
  input.indexed_tokens = static_cast<int32_t>(std::min(tokens, s.summarised_tokens()));
  input.surprisal = s.series.surprisal;
  input.boundary = s.series.boundary;
  input.cancelled = codec.cancelled.get();
  return input;
}

bool Store::Impl::Due(Sequence* s) {
  CodecState& codec = *s->codec;
  if (s->truncate_to) return false;  // what is about to go is not packed
  if (!s->prefill_done && s->tokens <= codec.awaited_prompt) return false;
  if (codec.recompressor->Due(InputOf(*s))) return true;
  if (!s->prefill_done || codec.prompt_settled) return false;
  codec.prompt_settled = true;
  KeepArtefact(*s);
  return codec.recompressor->Due(InputOf(*s));
}

void Store::Impl::NoteDue(Sequence* s) {
  if (!s->codec) return;
  s->codec->paused = false;
  OfferIfDue(s);
}

void Store::Impl::OfferIfDue(Sequence* s) {
  if (!s->codec || s->codec->work == Work::kQueued || s->codec->work == Work::kRunning) return;
  CodecState& codec = *s->codec;
  if (!codec.place_raw && !Due(s)) {
    codec.work = Work::kIdle;
    return;
  }
  if (codec.work == Work::kIdle) {
    codec.work = Work::kDue;
    codec.since = Clock::now();
  }
  if (codec.paused) return;
  const bool waits = codec.failures > 0 && Clock::now() < codec.retry_at;
  if (!waits && sink_ != nullptr && TakeWorkPlace(s) &&
      sink_->Offer(s->id, codec.recompressor->ReleasableBytes(InputOf(*s)))) {
    codec.work = Work::kQueued;
  } else {
    codec.queued = {};
    due_unoffered_ = true;
  }
}

// Nobody asked: a user whose places are taken is refused nothing, its work waits longer.
bool Store::Impl::TakeWorkPlace(Sequence* s) {
  const Tenant& tenant = *sessions_.at(s->session)->tenant;
  if (user_limits_->Room(tenant.user, Limit::kQueuedWork) == 0) return false;
  Result<UserPlace> place = UserPlace::Take(user_limits_, tenant.name, Limit::kQueuedWork);
  if (place.ok()) s->codec->queued = std::move(*place);
  return place.ok();
}

void Store::Impl::OfferDue() {
  MutexLock lock(mu_);
  if (!due_unoffered_ || sink_ == nullptr) return;
  due_unoffered_ = false;
  for (const auto& [id, s] : sequences_) {
    if (s->codec && s->codec->work == Work::kDue) OfferIfDue(s);
  }
}

void Store::Impl::SetRecompressSink(RecompressSink* sink) {
  MutexLock lock(mu_);
  sink_ = sink;
  if (sink == nullptr) requests_->EndAllLocked(WorkersStopped());
  for (const auto& [id, s] : sequences_) {
    if (!s->codec) continue;
    if (s->codec->work == Work::kQueued) s->codec->work = Work::kDue;
    s->codec->queued = {};
    if (sink != nullptr) {
      OfferIfDue(s);
    } else {
      s->codec->cancelled->store(true, std::memory_order_relaxed);
      s->codec->cancelled = std::make_shared<std::atomic<bool>>(false);
      AnswerWaiters(s, WorkersStopped());
    }
  }
}

bool Store::Impl::UnderPressure() const {
  MutexLock lock(mu_);
  return std::ranges::any_of(pools_.ids(), [this](PoolId pool) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return pool.tier() == Tier::kDevice &&
           static_cast<double>(pools_.used(pool)) >
               kWatermark * static_cast<double>(pools_.capacity(pool));
  });
}

// --- jobs ----------------------------------------------------------------------------------------

void Store::Impl::PinJob(const Sequence& s, RecompressJob* job) {
  std::vector<Page*>& pins = jobs_[job->id];
  Session* const session = sessions_.at(s.session).get();
  const auto pin = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (page == nullptr) return;
    ++page->jobs;
    pins.push_back(page);
    LetOthersIn(session, 1);
  };
  std::for_each(s.pages.begin(), s.pages.end(), pin);
  for (const Extent& extent : s.extents) pin(extent.page);
}

void Store::Impl::UnpinJob(uint64_t job) {
  const auto found = jobs_.find(job);
  KVS_CHECK(found != jobs_.end());
  std::vector<Page*>& pages = found->second;
  for (size_t unpinned = 1; !pages.empty(); ++unpinned) {
    Page* const page = pages.back();
    pages.pop_back();
    if (--page->jobs == 0 && parked_.erase(page) != 0) FreePages({&page, 1});
    if (unpinned % kPiecePages == 0) mu_.Yield();
  }
  jobs_.erase(job);
}

Result<RecompressJob> Store::Impl::TakeRecompression(uint64_t sequence) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Sequence * s, FindSequence(sequence));
  if (!s->codec || s->codec->work == Work::kRunning) {
    return Status(Code::kAborted, "WORK_NOTHING", "nothing to recompress, or it is on its way");
  }
  const LongRequest request(this, sessions_.at(s->session).get());
  CodecState& codec = *s->codec;
  codec.queued = {};
  if (codec.paused) return WorkCancelled(sequence);  // while a worker came for it
  const bool due = Due(s);
  if (!due && !codec.place_raw) {
    codec.work = Work::kIdle;
    AnswerWaiters(s);
    return Status(Code::kAborted, "WORK_NOTHING", "nothing is due any more");
  }
  RecompressJob job;
  job.id = next_job_++;
  job.sequence = s->id;
  job.device = sessions_.at(s->session)->device;
  job.geometry = s->model->desc.geometry;
  job.plan = s->plan.name;
  job.waited_us = MicrosSince(codec.since);
  if (due) job.recompressor = codec.recompressor;
  job.input = InputOf(*s);
  job.pages = codec.pages;
  job.extents = codec.extents;
  for (const Extent& extent : s->extents) job.descriptions.push_back(extent.description);
  job.surprisal = s->series.surprisal;
  job.boundary = s->series.boundary;
  job.cancelled = codec.cancelled;
  job.input.view.pages = job.pages.data();
  job.input.view.extents = job.extents.data();
  job.input.surprisal = job.surprisal;
  job.input.boundary = job.boundary;
  codec.work = Work::kRunning;
  codec.since = Clock::now();
  PinJob(*s, &job);
  return job;
}

Result<std::byte*> Store::Impl::StagePage(const Page& page, RecompressJob* job) {
  if (job->cancelled->load(std::memory_order_relaxed)) {
    return RunCancelled();
  }
  auto* const to = new (std::nothrow) std::byte[page.bytes];
  if (to == nullptr) {
    return ResourceExhausted("MEMORY_EXHAUSTED", "no host memory for rows that are recompressed");
  }
  job->staged.emplace_back(to);
  KVS_RETURN_IF_ERROR(pools_.Read(page, to));
  return to;
}

Status Store::Impl::StageRecompression(RecompressJob* job) {
  if (job->recompressor == nullptr || pools_.readable(Tier::kDevice)) return OkStatus();
  std::vector<Page*> pins;
  {
    MutexLock lock(mu_);
    pins = jobs_.at(job->id);
  }
  const RecompressReads reads = job->recompressor->Reads(job->input);
  if (reads.in_place) return OkStatus();
  job->input.far_packer = nullptr;
  const int32_t rows = job->geometry.page_tokens;
  auto pin = pins.begin();  // in the order of PinJob
  for (size_t i = 0; i < job->pages.size(); ++i) {
    if (job->pages[i] == nullptr) continue;
    const Page& page = **pin++;
    if (pools_.readable(page.arena->tier)) continue;
    job->pages[i] = nullptr;
    const auto begin = static_cast<int64_t>(i) * rows;
    if (begin + rows <= reads.rows.begin || begin >= reads.rows.end) continue;
    KVS_ASSIGN_OR_RETURN(job->pages[i], StagePage(page, job));
  }
  for (size_t i = 0; i < job->extents.size(); ++i) {
    const Page& page = **pin++;
    const bool read =
        std::ranges::find(reads.extents, static_cast<int32_t>(i)) != reads.extents.end();
    if (!read || pools_.readable(page.arena->tier)) continue;
    KVS_ASSIGN_OR_RETURN(job->extents[i].data, StagePage(page, job));
    job->extents[i].description = nullptr;
  }
  return OkStatus();
}

void Store::Impl::AbandonRecompression(RecompressJob job, const Status& why) {
  MutexLock lock(mu_);
  UnpinJob(job);
  const Result<Sequence*> s = FindSequence(job.sequence);
  if (s.ok()) NoteFailed(*s, why);
}

void Store::Impl::NoteFailed(Sequence* s, const Status& why) {
  CodecState& codec = *s->codec;
  if (why.code() == Code::kAborted) {  // no failure: somebody wanted it so
    codec.work = Work::kDue;
    codec.since = Clock::now();
    due_unoffered_ = true;
    if (codec.paused) AnswerWaiters(s);  // who came while it was ending
    return;
  }
  ++counters_.recompress_failures;
  codec.failed = why;
  codec.retry_at =
      Clock::now() + options_.recompress_retry * (1 << std::min(codec.failures, kLongestBackoff));
  ++codec.failures;
  codec.work = Work::kDue;
  codec.since = Clock::now();
  due_unoffered_ = true;
  AnswerWaiters(s);
}

void Store::Impl::NoteDone(Sequence* s) {
  CodecState& codec = *s->codec;
  ++codec.runs;
  codec.failures = 0;
  codec.failed = OkStatus();
  codec.work = Work::kIdle;
  codec.place_raw = false;
  OfferIfDue(s);
  AnswerWaiters(s);
}

// --- publishing ----------------------------------------------------------------------------------

Status Store::Impl::TakeExtents(const Sequence& s, const RecompressOutput& output,
                                std::vector<Page*>* fresh) {
  const Session& session = *sessions_.at(s.session);
  Status status;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) continue;
    const Tier tier = draft.tier == TierKind::kHost ? Tier::kHost : Tier::kDevice;
    status = Allocate({session.tenant, kDaemon, nullptr, s.model->id, PoolsOf(session, tier)},
                      draft.size(), 1, fresh);
    if (!status.ok()) break;
  }
  if (!status.ok()) {
    FreePages(*fresh);
    fresh->clear();
    return status;
  }
  for (Page* page : *fresh) {
    page->sealed = true;
    RefPage(page);
    pins_.push_back(page);
  }
  return status;
}

void Store::Impl::DropFresh(std::vector<Page*>* fresh) {
  for (Page* page : *fresh) {
    const auto at = std::find(pins_.begin(), pins_.end(), page);
    KVS_CHECK(at != pins_.end());
    *at = pins_.back();
    pins_.pop_back();
    Release(page);
  }
  fresh->clear();
}

Status Store::Impl::CopyDrafts(const RecompressOutput& output, const std::vector<Page*>& fresh,
                               PoolId packed_by) {
  size_t next = 0;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) continue;
    const Page& to = *fresh[next++];
    const bool far = draft.far.data != nullptr;
    const std::span<const std::byte> bytes = draft.bytes;
    KVS_RETURN_IF_ERROR(
        far ? pools_.Fill(to, bytes, {draft.far.data.get(), draft.far.size}, packed_by)
            : pools_.Fill(to, {}, bytes, to.arena->pool));
  }
  return OkStatus();
}

std::shared_ptr<const std::vector<std::byte>> Store::Impl::DescriptionFor(
    const Page& page, std::span<const std::byte> extent) const {
  if (pools_.readable(page.arena->tier)) return nullptr;
  const auto size = static_cast<int64_t>(extent.size());
  const auto front = static_cast<size_t>(std::min(size, kExtentFrontBytes));
  return std::make_shared<const std::vector<std::byte>>(
      extent.begin(), extent.begin() + DescriptionBytes(extent.first(front), size));
}

Status Store::Impl::SwapExtents(Sequence* s, const RecompressOutput& output,
                                std::vector<Page*>* fresh, std::unique_ptr<Recompressor> next,
                                RecompressResult* result) {
  Session* session = sessions_.at(s->session).get();
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * table,
                       ReserveTable(session, *s, s->table->page_capacity, output.extents.size()));
  std::vector<Extent> extents;
  size_t taken = 0;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) {
      extents.push_back(s->extents[static_cast<size_t>(draft.kept)]);
    } else {
      Page* const page = (*fresh)[taken++];
      extents.push_back({page, draft.size(), draft.tokens, ChecksumOf(draft.bytes),
                         DescriptionFor(*page, draft.bytes)});
      result->written_bytes += draft.size();
    }
    RefPage(extents.back().page);
  }
  std::swap(s->extents, extents);
  ReleaseExtents(&extents);
  DropFresh(fresh);
  CodecState& codec = *s->codec;
  codec.recompressor = std::move(next);
  codec.released = Union(codec.released, output.released);
  const std::vector<size_t> released = ReleasedPages(*s);
  if (s->plan.stored.keep_raw == KeepRaw::kNo) result->released_bytes += GiveBack(s, released);
  result->extents = static_cast<uint32_t>(s->extents.size());
  Publish(session, s, table);
  Advance(session->tenant);
  return OkStatus();
}

Result<RecompressResult> Store::Impl::PublishRecompression(RecompressJob job,
                                                           std::unique_ptr<Recompressor> next,
                                                           RecompressOutput output) {
  RecompressResult result;
  std::vector<Page*> fresh;
  const auto cancelled = [&job] { return job.cancelled->load(std::memory_order_relaxed); };
  // What leaves the sequence as it was; also frees what was taken for it.
  const auto fail = [&](const Result<Sequence*>& s, const Status& why) KVS_REQUIRES(mu_) {
    if (!fresh.empty()) {
      Tenant* tenant = tenants_by_id_[fresh.front()->arena->tenant];
      DropFresh(&fresh);
      Advance(tenant);
    }
    if (s.ok()) NoteFailed(*s, why);
    return why;
  };
  if (job.recompressor != nullptr) {
    {
      MutexLock lock(mu_);
      UnpinJob(job);  // read already; extents that are kept are the sequence's
      const Result<Sequence*> s = FindSequence(job.sequence);
      Status status = s.ok() ? CheckDrafts(output, (*s)->extents.size()) : s.status();
      if (status.ok() && cancelled()) status = RunCancelled();
      if (status.ok()) status = TakeExtents(**s, output, &fresh);
      if (!status.ok()) return fail(s, status);
    }
    Status status = CopyDrafts(output, fresh, PoolId::Device(job.device));
    MutexLock lock(mu_);
    const Result<Sequence*> s = FindSequence(job.sequence);
    if (status.ok() && cancelled()) status = RunCancelled();
    if (status.ok()) {
      status = s.ok() ? SwapExtents(*s, output, &fresh, std::move(next), &result) : s.status();
    }
    if (!status.ok()) return fail(s, status);
  } else {
    MutexLock lock(mu_);
    UnpinJob(job);
  }
  const Status placed = PlaceRaw(job.sequence, &result.released_bytes);
  MutexLock lock(mu_);
  const Result<Sequence*> s = FindSequence(job.sequence);
  if (!s.ok()) return s.status();
  if (job.recompressor != nullptr) ++counters_.recompressions;
  counters_.recompressed_bytes += result.written_bytes;
  counters_.released_bytes += result.released_bytes;
  (*s)->codec->released_bytes += result.released_bytes;
  if (!placed.ok()) {
    (*s)->codec->place_raw = true;
    return fail(s, placed);
  }
  NoteDone(*s);
  return result;
}

// --- settling ------------------------------------------------------------------------------------

void Store::Impl::AnswerWaiters(Sequence* s, const Status& status) {
  for (SettleDone& done : s->codec->waiters) settled_.emplace_back(std::move(done), status);
  s->codec->waiters.clear();
}

void Store::Impl::AnswerWaiters(Sequence* s) {
  const CodecState& codec = *s->codec;
  if (codec.work == Work::kIdle || sink_ == nullptr) return AnswerWaiters(s, OkStatus());
  if (codec.work == Work::kDue && codec.paused) return AnswerWaiters(s, WorkCancelled(s->id));
  if (codec.work == Work::kDue && codec.failures > 0) AnswerWaiters(s, codec.failed);
}

void Store::Impl::TellSettled() {
  std::vector<std::pair<SettleDone, Status>> settled;
  {
    MutexLock lock(mu_);
    settled.swap(settled_);
  }
  for (const auto& [done, status] : settled) done(status);
}

void Store::Impl::Settle(uint64_t session, uint64_t sequence, SettleDone done) {
  MutexLock lock(mu_);
  const Result<Sequence*> s = FindSequence(session, sequence);
  if (!s.ok() || !(*s)->codec) {
    settled_.emplace_back(std::move(done), s.status());
    return;
  }
  (*s)->codec->waiters.push_back(std::move(done));
  AnswerWaiters(*s);
}

WorkInfo Store::Impl::WorkOf(const Sequence& s) const {
  const CodecState& codec = *s.codec;
  WorkInfo info;
  info.sequence = s.id;
  info.session = s.session;
  info.plan = s.plan.name;
  info.state = codec.work == Work::kRunning  ? "running"
               : codec.work == Work::kQueued ? "queued"
               : codec.paused                ? "cancelled"
                                             : "due";
  info.waiting_us = MicrosSince(codec.since);
  info.releasable_bytes = codec.recompressor->ReleasableBytes(InputOf(s));
  info.runs = codec.runs;
  info.failures = codec.failures;
  info.error = codec.failed.ok() ? "" : codec.failed.ToString();
  return info;
}

std::vector<WorkInfo> Store::Impl::Work() const {
  MutexLock lock(mu_);
  std::vector<WorkInfo> list;
  for (const auto& [id, s] : sequences_) {
    if (!s->codec || (s->codec->work == Work::kIdle && s->codec->failed.ok())) continue;
    list.push_back(WorkOf(*s));
  }
  requests_->ListLocked(&list);
  std::stable_sort(list.begin(), list.end(),
                   [](const WorkInfo& a, const WorkInfo& b) { return a.sequence < b.sequence; });
  return list;
}

// --- whole prompts -------------------------------------------------------------------------------

void Store::Impl::KeepArtefact(const Sequence& s) {
  if (s.extents.empty()) return;
  const CodecState& codec = *s.codec;
  EnterArtefact({codec.prompt_key, s.extents, codec.recompressor, codec.released, s.prompt_tokens,
                 s.series.Slice(0, s.prompt_tokens)});
  if (tier_ != nullptr && !s.model->OfOneSession()) tier_->Offer(codec.prompt_key);
  OfferKept(s);
}

void Store::Impl::EnterArtefact(Artefact artefact) {
  for (const Extent& extent : artefact.extents) {
    RefPage(extent.page);
    ++extent.page->artefacts;
  }
  if (std::optional<Artefact> left = artefacts_.Insert(std::move(artefact))) {
    DropArtefact(std::move(*left));
  }
}

void Store::Impl::AttachArtefact(Session* session, Sequence* s) {
  CodecState& codec = *s->codec;
  codec.prompt_key = Artefacts::KeyOf(s->chain, s->last_key, s->tail, FormatPlan(s->plan),
                                      codec.parameters_digest);
  if (codec.opened_on != 0) codec.prompt_settled = codec.opened_on == s->prompt_tokens;
  // Rows that the engine computed itself may differ in a bit from those that were recompressed.
  if (!s->HoldsAll(s->prompt_tokens) || !s->extents.empty()) return;
  if (codec.work == Work::kRunning) return;
  if (FindArtefact(codec.prompt_key, session->device) == nullptr) return;
  const Artefact* const artefact = artefacts_.Find(codec.prompt_key);
  const Result<shm::SequenceTable*> table =
      ReserveTable(session, *s, s->table->page_capacity, artefact->extents.size());
  if (!table.ok()) return;  // it is built anew when there is room
  s->extents = artefact->extents;
  for (const Extent& extent : s->extents) RefPage(extent.page);
  codec.recompressor = artefact->recompressor;
  codec.released = artefact->released;
  codec.prompt_settled = true;
  const std::vector<size_t> released = ReleasedPages(*s);
  if (s->plan.stored.keep_raw == KeepRaw::kNo) {
    counters_.released_bytes += GiveBack(s, released);
  } else {
    codec.place_raw = std::any_of(released.begin(), released.end(), [s](size_t i) {
      return s->pages[i]->arena->tier == Tier::kDevice;
    });
  }
  ++counters_.artefact_hits;
  Publish(session, s, *table);
  Advance(session->tenant);
}

}  // namespace kvstrata
