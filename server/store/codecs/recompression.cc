// SPDX-License-Identifier: Apache-2.0
#include "server/store/codecs/recompression.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/capacity.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"
#include "server/store/requests/answers.h"
#include "server/store/space/raw_pages.h"

namespace kvstrata {
namespace {

using Work = CodecState::Work;

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

Status RestLost() {
  return {
      Code::kDataLoss, "REST_LOST",
      "the lower planes that it opened without did not come from the tier; close it and open it "
      "again"};
}

Status RunCancelled() {
  return {Code::kAborted, "CANCELLED", "recompression was cancelled; nothing has changed"};
}

// Until all of the prompt is recompressed, what was decoded since is not shown: an artefact of the
// prompt is then the same whenever the worker comes.
RecompressInput InputOf(const Sequence& s) {
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

// Outside of the lock: extents are held. Those on the host for kernels of the job's device.
Status ReachExtents(const PageMemory& memory, const RecompressJob& job) {
  for (const ExtentView& extent : job.extents) {
    if (extent.description != nullptr) continue;
    KVS_RETURN_IF_ERROR(memory.Reach(PoolId::Device(job.device), extent.data));
  }
  return OkStatus();
}

// Outside of the lock: the page is held.
Result<std::byte*> StagePage(const PageMemory& memory, const Page& page, RecompressJob* job) {
  if (job->cancelled->load(std::memory_order_relaxed)) {
    return RunCancelled();
  }
  auto* const to = new (std::nothrow) std::byte[page.bytes];
  if (to == nullptr) {
    return ResourceExhausted("MEMORY_EXHAUSTED", "no host memory for rows that are recompressed");
  }
  job->staged.emplace_back(to);
  KVS_RETURN_IF_ERROR(memory.Read(page, to));
  return to;
}

// Nobody asked: a user whose places are taken is refused nothing, its work waits longer.
bool TakeWorkPlace(const std::shared_ptr<UserLimits>& limits, const Tenant& tenant, Sequence* s) {
  if (limits->Room(tenant.user, Limit::kQueuedWork) == 0) return false;
  Result<UserPlace> place = UserPlace::Take(limits, tenant.name, Limit::kQueuedWork);
  if (place.ok()) s->codec->queued = std::move(*place);
  return place.ok();
}

}  // namespace

Recompression::Recompression(Books& books, const StoreOptions& options, Answers& answers,
                             SessionCatalog& catalog, PageHolds& holds, CodecExtents& extents,
                             RawPages& raw_pages)
    : books_(books),
      options_(options),
      answers_(answers),
      catalog_(catalog),
      holds_(holds),
      extents_(extents),
      raw_pages_(raw_pages) {}

// --- what is due ---------------------------------------------------------------------------------

bool Recompression::Due(Sequence* s) {
  CodecState& codec = *s->codec;
  if (s->truncate_to) return false;  // what is about to go is not packed
  if (codec.rest_load != 0) return false;
  if (!s->prefill_done && s->tokens <= codec.awaited_prompt) return false;
  if (codec.recompressor->Due(InputOf(*s))) return true;
  if (!s->prefill_done || codec.prompt_settled) return false;
  codec.prompt_settled = true;
  extents_.KeepArtefact(*s);
  return codec.recompressor->Due(InputOf(*s));
}

void Recompression::NoteDue(Sequence* s) {
  if (!s->codec) return;
  s->codec->paused = false;
  OfferIfDue(s);
}

void Recompression::NoteAsked(Sequence* s) {
  s->codec->retry_at = {};
  NoteDue(s);
}

void Recompression::OfferIfDue(Sequence* s) {
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
  if (!waits && sink_ != nullptr &&
      TakeWorkPlace(options_.user_limits, *catalog_.SessionOf(s->session)->tenant, s) &&
      sink_->Offer(s->id, codec.recompressor->ReleasableBytes(InputOf(*s)))) {
    codec.work = Work::kQueued;
  } else {
    codec.queued = {};
    due_unoffered_ = true;
  }
}

void Recompression::OfferDue() {
  answers_.TellAfter([&] {
    StoreLock lock(books_.mu);
    if (!due_unoffered_ || sink_ == nullptr) return;
    due_unoffered_ = false;
    for (const auto& [id, s] : catalog_.sequences()) {
      if (s->codec && s->codec->work == Work::kDue) OfferIfDue(s);
    }
  });
}

void Recompression::SetSinkLocked(RecompressSink* sink) {
  sink_ = sink;
  for (const auto& [id, s] : catalog_.sequences()) {
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

// --- jobs ----------------------------------------------------------------------------------------

void Recompression::KeepPages(const Sequence& s, RecompressJob* job) {
  Session* const session = catalog_.SessionOf(s.session);
  const auto keep = [&](Page* page) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (page == nullptr) return;
    holds_.Keep(job->hold, page);
    catalog_.LetOthersIn(session, 1);
  };
  std::for_each(s.pages.begin(), s.pages.end(), keep);
  for (const Extent& extent : s.extents) keep(extent.page);
}

Result<RecompressJob> Recompression::TakeRecompression(uint64_t sequence) {
  return answers_.TellAfter([&] { return TakeNow(sequence); });
}

Result<RecompressJob> Recompression::TakeNow(uint64_t sequence) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(sequence));
  if (!s->codec || s->codec->work == Work::kRunning) {
    return Status(Code::kAborted, "WORK_NOTHING", "nothing to recompress, or it is on its way");
  }
  const LongRequest request(&catalog_, catalog_.SessionOf(s->session));
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
  job.hold = holds_.Begin();
  job.sequence = s->id;
  job.device = catalog_.SessionOf(s->session)->device;
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
  KeepPages(*s, &job);
  return job;
}

Status Recompression::StageRecompression(RecompressJob* job) {
  if (job->recompressor == nullptr || books_.memory.readable(Tier::kDevice)) return OkStatus();
  std::vector<Page*> kept;
  {
    StoreLock lock(books_.mu);
    kept = holds_.kept(job->hold);
  }
  RecompressReads reads = job->recompressor->Reads(job->input);
  if (reads.in_place) {
    if (ReachExtents(books_.memory, *job).ok()) return OkStatus();
    job->input.gpu_packers = nullptr;
    reads = job->recompressor->Reads(job->input);
  }
  job->input.gpu_packers = nullptr;
  const int32_t rows = job->geometry.page_tokens;
  auto next = kept.begin();  // in the order of KeepPages
  for (size_t i = 0; i < job->pages.size(); ++i) {
    if (job->pages[i] == nullptr) continue;
    const Page& page = **next++;
    if (books_.memory.readable(page.arena->tier)) continue;
    job->pages[i] = nullptr;
    const auto begin = static_cast<int64_t>(i) * rows;
    if (begin + rows <= reads.rows.begin || begin >= reads.rows.end) continue;
    KVS_ASSIGN_OR_RETURN(job->pages[i], StagePage(books_.memory, page, job));
  }
  for (size_t i = 0; i < job->extents.size(); ++i) {
    const Page& page = **next++;
    const bool read =
        std::ranges::find(reads.extents, static_cast<int32_t>(i)) != reads.extents.end();
    if (!read || books_.memory.readable(page.arena->tier)) continue;
    KVS_ASSIGN_OR_RETURN(job->extents[i].data, StagePage(books_.memory, page, job));
    job->extents[i].description = nullptr;
  }
  return OkStatus();
}

void Recompression::AbandonRecompression(RecompressJob job, const Status& why) {
  answers_.TellAfter([&] {
    StoreLock lock(books_.mu);
    holds_.End(job.hold);
    const Result<Sequence*> s = catalog_.FindSequence(job.sequence);
    if (s.ok()) NoteFailed(*s, why);
  });
}

void Recompression::NoteFailed(Sequence* s, const Status& why) {
  CodecState& codec = *s->codec;
  if (why.code() == Code::kAborted) {  // no failure: somebody wanted it so
    codec.work = Work::kDue;
    codec.since = Clock::now();
    due_unoffered_ = true;
    if (codec.paused) AnswerWaiters(s);  // who came while it was ending
    return;
  }
  ++books_.counters.recompress_failures;
  codec.failed = why;
  codec.retry_at =
      Clock::now() + options_.recompress_retry * (1 << std::min(codec.failures, kLongestBackoff));
  ++codec.failures;
  codec.work = Work::kDue;
  codec.since = Clock::now();
  due_unoffered_ = true;
  AnswerWaiters(s);
}

void Recompression::NoteDone(Sequence* s) {
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

Status Recompression::PublishRun(const RecompressJob& job, std::unique_ptr<Recompressor> next,
                                 const RecompressOutput& output, RecompressResult* result) {
  FreshPages fresh;
  const auto cancelled = [&job] { return job.cancelled->load(std::memory_order_relaxed); };
  // What leaves the sequence as it was; also frees what was taken for it.
  const auto fail = [&](const Result<Sequence*>& s, const Status& why) KVS_REQUIRES(store_lock) {
    extents_.Discard(&fresh);
    if (s.ok()) NoteFailed(*s, why);
    return why;
  };
  {
    StoreLock lock(books_.mu);
    holds_.End(job.hold);  // read already; extents that are kept are the sequence's
    const Result<Sequence*> s = catalog_.FindSequence(job.sequence);
    Status status = s.ok() ? CheckDrafts(output, (*s)->extents.size()) : s.status();
    if (status.ok() && cancelled()) status = RunCancelled();
    if (status.ok()) status = extents_.TakeExtents(**s, output, &fresh);
    if (!status.ok()) return fail(s, status);
  }
  Status status = extents_.CopyDrafts(output, fresh, PoolId::Device(job.device));
  StoreLock lock(books_.mu);
  const Result<Sequence*> s = catalog_.FindSequence(job.sequence);
  if (status.ok() && cancelled()) status = RunCancelled();
  if (status.ok()) {
    status = s.ok() ? extents_.Swap(*s, output, &fresh, std::move(next), result) : s.status();
  }
  return status.ok() ? status : fail(s, status);
}

Result<RecompressResult> Recompression::PublishNow(RecompressJob job,
                                                   std::unique_ptr<Recompressor> next,
                                                   RecompressOutput output) {
  RecompressResult result;
  if (job.recompressor != nullptr) {
    KVS_RETURN_IF_ERROR(PublishRun(job, std::move(next), output, &result));
  } else {
    StoreLock lock(books_.mu);
    holds_.End(job.hold);
  }
  const Status placed = raw_pages_.PlaceRaw(job.sequence, &result.released_bytes);
  StoreLock lock(books_.mu);
  const Result<Sequence*> s = catalog_.FindSequence(job.sequence);
  if (!s.ok()) return s.status();
  if (job.recompressor != nullptr) ++books_.counters.recompressions;
  books_.counters.recompressed_bytes += result.written_bytes;
  books_.counters.released_bytes += result.released_bytes;
  (*s)->codec->released_bytes += result.released_bytes;
  if (!placed.ok()) {
    (*s)->codec->place_raw = true;
    NoteFailed(*s, placed);
    return placed;
  }
  NoteDone(*s);
  return result;
}

Result<RecompressResult> Recompression::PublishRecompression(RecompressJob job,
                                                             std::unique_ptr<Recompressor> next,
                                                             RecompressOutput output) {
  return answers_.TellAfter(
      [&] { return PublishNow(std::move(job), std::move(next), std::move(output)); });
}

void Recompression::EndRest(uint64_t session_id, uint64_t load, const Artefact* whole) {
  answers_.TellAfter([&] {
    StoreLock lock(books_.mu);
    const Result<Session*> session = catalog_.FindSession(session_id);
    if (!session.ok()) return;
    for (const auto& [id, s] : (*session)->sequences) {
      if (!s->codec || s->codec->rest_load != load) continue;
      const Status status =
          whole == nullptr ? RestLost() : extents_.TakeRest(*session, s.get(), *whole);
      if (!status.ok()) extents_.LoseRest(*session, s.get(), status);
      NoteDue(s.get());
      AnswerWaiters(s.get());
    }
  });
}

// --- settling ------------------------------------------------------------------------------------

void Recompression::AnswerWaiters(Sequence* s, const Status& status) {
  for (SettleDone& done : s->codec->waiters) answers_.Add(std::move(done), status);
  s->codec->waiters.clear();
}

void Recompression::AnswerWaiters(Sequence* s) {
  const CodecState& codec = *s->codec;
  if (codec.rest_load != 0) {
    return codec.rest_lost.ok() ? void() : AnswerWaiters(s, codec.rest_lost);
  }
  if (codec.work == Work::kIdle || sink_ == nullptr) return AnswerWaiters(s, OkStatus());
  if (codec.work == Work::kDue && codec.paused) return AnswerWaiters(s, WorkCancelled(s->id));
  if (codec.work == Work::kDue && codec.failures > 0) AnswerWaiters(s, codec.failed);
}

void Recompression::Settle(uint64_t session, uint64_t sequence, SettleDone done) {
  answers_.TellAfter([&] {
    StoreLock lock(books_.mu);
    const Result<Sequence*> s = catalog_.FindSequence(session, sequence);
    if (!s.ok() || !(*s)->codec) {
      answers_.Add(std::move(done), s.status());
      return;
    }
    (*s)->codec->waiters.push_back(std::move(done));
    AnswerWaiters(*s);
  });
}

void Recompression::ListLocked(std::vector<WorkInfo>* list) const {
  for (const auto& [id, s] : catalog_.sequences()) {
    if (!s->codec || (s->codec->work == Work::kIdle && s->codec->failed.ok())) continue;
    list->push_back(WorkOf(*s));
  }
}

WorkInfo Recompression::WorkOf(const Sequence& s) const {
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

}  // namespace kvstrata
