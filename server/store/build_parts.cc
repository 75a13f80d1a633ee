// Parts of builds (build_job.h): what comes next, what a worker gets, how it is entered.
#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

Status BuildOver() { return {Code::kAborted, "BUILD_OVER", "nothing more is to be built"}; }

Status NoHostMemory() {
  return ResourceExhausted("MEMORY_EXHAUSTED", "no host memory for rows that are summarised");
}

uint64_t WholeGranules(int64_t bytes) {
  const auto n = static_cast<uint64_t>(bytes);
  return (n + kMemoryGranularity - 1) / kMemoryGranularity * kMemoryGranularity;
}

ExtentDraft DraftOf(uint64_t bytes, uint32_t from, uint32_t to, TierKind tier) {
  ExtentDraft draft;
  draft.bytes.resize(bytes);
  draft.tokens = {static_cast<int32_t>(from), static_cast<int32_t>(to)};
  draft.tier = tier;
  return draft;
}

}  // namespace

// --- what comes next -----------------------------------------------------------------------------

WorkRequests::Pending* WorkRequests::PendingOf(const BuildJob& job) {
  const auto found = builds_.find(job.sequence);
  return found == builds_.end() || found->second.id != job.build ? nullptr : &found->second;
}

PageKey WorkRequests::ArtefactKey(const Sequence& s, const Pending& p) {
  return Artefacts::KeyOf(s.chain, s.last_key, s.tail, FormatPlan(p.plan), p.parameters_digest);
}

Run WorkRequests::NextBlocks(const Sequence& s, Pending* p) const {
  const auto block = static_cast<uint32_t>(p->index.block_tokens);
  if (p->index.kind == IndexLayout::Kind::kNone || block % s.page_tokens() != 0) return {};
  const uint32_t end = s.tokens / block * block;
  const uint32_t device = store_->sessions_.at(s.session)->device;
  const auto there = [&](uint32_t to) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const Page& last = *s.pages[to / s.page_tokens() - 1];
    return store_->prefix_.FindFor(device, IndexBlockKey(last.key, p->index)) != nullptr;
  };
  if (!p->own) {
    while (p->built_to < end && there(p->built_to + block)) p->built_to += block;
  }
  const uint32_t from = p->own ? s.indexed_tokens : p->built_to;
  if (from >= end) return {};
  const uint64_t bytes = uint64_t{block / s.page_tokens()} *
                         static_cast<uint64_t>(s.model->desc.geometry.page_bytes());
  const auto blocks = static_cast<uint32_t>(std::max<uint64_t>(BuildJob::kPartBytes / bytes, 1));
  const uint64_t to = (uint64_t{from / block} + blocks) * block;
  return {static_cast<int32_t>(from), static_cast<int32_t>(std::min<uint64_t>(to, end))};
}

// --- what a worker gets --------------------------------------------------------------------------

void WorkRequests::ReadLocked(Page* page, BuildJob* job, std::byte** address,
                              std::vector<Staged>* staged) {
  ++page->jobs;
  store_->jobs_[job->id].push_back(page);
  if (store_->pools_.readable(page->arena->tier)) {
    *address = page->base();
  } else {
    staged->push_back({page, address, nullptr});
  }
}

void WorkRequests::FillBlocks(const Sequence& s, Run rows, BuildJob* job,
                              std::vector<Staged>* staged) {
  job->from = static_cast<uint32_t>(rows.begin);
  job->to = static_cast<uint32_t>(rows.end);
  const auto block = static_cast<uint32_t>(job->index.block_tokens);
  const uint32_t first = job->from / block, last = job->to / block, page_tokens = s.page_tokens();
  job->blocks.resize(last);
  for (uint32_t i = first; i < last; ++i) {
    job->drafts.push_back(
        DraftOf(WholeGranules(job->index.block_bytes), i * block, (i + 1) * block, job->plan.tier));
    job->blocks[i] = job->drafts.back().bytes.data();
    job->keys.push_back(IndexBlockKey(s.pages[(i + 1) * block / page_tokens - 1]->key, job->index));
  }
  job->pages.resize(s.PagesFor(job->to));
  for (uint32_t i = job->from / page_tokens; i < job->pages.size(); ++i) {
    ReadLocked(s.pages[i], job, &job->pages[i], staged);
  }
  // Rows of units that were complete already: their keys may be gone.
  if (job->from % block == 0) return;
  Page* const begun = s.index_blocks[first];
  ++begun->jobs;
  store_->jobs_[job->id].push_back(begun);
  staged->push_back({begun, nullptr, job->blocks[first]});
}

void WorkRequests::FillExtents(const Sequence& s, const Pending& p, BuildJob* job,
                               std::vector<Staged>* staged) {
  job->recompressor = p.recompressor;
  job->pages.resize(s.PagesFor(s.tokens));
  for (size_t i = 0; i < job->pages.size(); ++i) {
    ReadLocked(s.pages[i], job, &job->pages[i], staged);
  }
  job->surprisal = s.series.surprisal;
  job->boundary = s.series.boundary;
  const auto tokens = static_cast<int32_t>(s.tokens);
  job->input.view.pages = job->pages.data();
  job->input.view.tokens = tokens;
  job->input.prompt_tokens = tokens;
  job->input.indexed_tokens = tokens;
  job->input.surprisal = job->surprisal;
  job->input.boundary = job->boundary;
  job->input.cancelled = job->cancelled.get();
}

Result<BuildJob> WorkRequests::TakeLocked(uint64_t sequence, std::vector<Staged>* staged) {
  const auto found = builds_.find(sequence);
  if (found == builds_.end() || found->second.running) return BuildOver();
  Pending& p = found->second;
  Sequence* const s = store_->sequences_.at(sequence);
  if (const Status inputs = CheckInputs(*s, p); !inputs.ok()) {
    EndBuildLocked(sequence, inputs);
    return BuildOver();
  }
  const Run next = NextBlocks(*s, &p);
  if (next.begin == next.end && !WantsExtents(p)) {
    BuildResult result = ResultOf(*s, p);
    std::vector<BuildDone> waiters = std::move(p.waiters);
    const bool own = p.own;
    builds_.erase(found);
    if (!own || FinishLocked(s, &result, waiters)) AnswerLocked(std::move(waiters), result);
    return BuildOver();
  }
  if (!p.begun) p.since = Clock::now();
  p.begun = p.running = true;
  BuildJob job;
  job.id = store_->next_job_++;
  job.build = p.id;
  job.sequence = sequence;
  job.geometry = s->model->desc.geometry;
  job.plan = p.plan;
  job.index = p.index;
  job.cancelled = p.cancelled;
  store_->jobs_[job.id];
  if (next.begin < next.end) {
    FillBlocks(*s, next, &job, staged);
  } else {
    p.artefact = ArtefactKey(*s, p);
    FillExtents(*s, p, &job, staged);
  }
  return job;
}

Status WorkRequests::Stage(BuildJob* job, const std::vector<Staged>& staged) {
  for (const Staged& s : staged) {
    std::byte* to = s.to;
    if (s.address != nullptr) {
      to = new (std::nothrow) std::byte[s.page->bytes];
      if (to == nullptr) return NoHostMemory();
      job->staged.emplace_back(to);
      *s.address = to;
    }
    KVS_RETURN_IF_ERROR(store_->ReadPage(*s.page, to));
  }
  return OkStatus();
}

Result<BuildJob> WorkRequests::TakeBuild(uint64_t sequence) {
  std::vector<Staged> staged;
  Result<BuildJob> job = [&]() -> Result<BuildJob> {
    MutexLock lock(store_->mu_);
    return TakeLocked(sequence, &staged);
  }();
  store_->TellSettled();
  if (!job.ok()) return job;
  if (const Status read = Stage(&*job, staged); !read.ok()) {
    AbandonBuild(std::move(*job), read);
    return read;
  }
  return job;
}

void WorkRequests::AbandonBuild(BuildJob job, const Status& why) {
  {
    MutexLock lock(store_->mu_);
    store_->UnpinJob(job.id);
    if (PendingOf(job) != nullptr) EndBuildLocked(job.sequence, why);
  }
  store_->TellSettled();
}

// --- what becomes of it --------------------------------------------------------------------------

Status WorkRequests::TakePages(const BuildJob& job, const RecompressOutput& output,
                               std::vector<Page*>* fresh) {
  {
    MutexLock lock(store_->mu_);
    store_->UnpinJob(job.id);  // read already
    if (PendingOf(job) == nullptr) return BuildOver();
    KVS_RETURN_IF_ERROR(store_->TakeExtents(*store_->sequences_.at(job.sequence), output, fresh));
  }
  return store_->CopyDrafts(output, *fresh, PoolId::Host());
}

void WorkRequests::DropPages(std::vector<Page*>* fresh) {
  if (fresh->empty()) return;
  Tenant* const tenant = store_->tenants_by_id_[fresh->front()->arena->tenant];
  store_->DropFresh(fresh);
  store_->Advance(tenant);
}

void WorkRequests::EnterBlocks(Sequence* s, Pending* p, const BuildJob& job,
                               std::span<Page* const> fresh) {
  const auto block = static_cast<uint32_t>(job.index.block_tokens);
  const uint32_t device = store_->sessions_.at(s->session)->device;
  for (size_t i = 0; i < fresh.size(); ++i) {
    fresh[i]->key = job.keys[i];
    fresh[i]->summary = true;
    store_->EnterPrefix(*s, fresh[i]);
    if (!p->own) continue;
    Page* const there = store_->prefix_.FindFor(device, job.keys[i]);
    Page* const use = there == nullptr ? fresh[i] : there;
    Page*& at = s->index_blocks[job.from / block + i];
    store_->RefPage(use);
    store_->Release(at);
    at = use;
  }
  p->built_blocks += static_cast<uint32_t>(fresh.size());
  p->built_to = std::max(p->built_to, job.to);
  p->running = false;
  if (p->own) s->indexed_tokens = std::max(s->indexed_tokens, job.to);
}

void WorkRequests::PublishBlocks(BuildJob job) {
  RecompressOutput output;
  output.extents = std::move(job.drafts);
  std::vector<Page*> fresh;
  Status status = TakePages(job, output, &fresh);
  {
    MutexLock lock(store_->mu_);
    (void)store_->FindSequence(job.sequence);  // waits: its blocks are about to change
    Pending* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      Sequence* const s = store_->sequences_.at(job.sequence);
      Session* const session = store_->sessions_.at(s->session).get();
      const Result<shm::SequenceTable*> table =
          p->own ? store_->ReserveTable(session, *s, s->table->page_capacity)
                 : Result<shm::SequenceTable*>(nullptr);
      status = table.status();
      if (status.ok()) {
        EnterBlocks(s, p, job, fresh);
        if (p->own) store_->Publish(session, s, *table);
        store_->OfferIfDue(s);
      }
    }
    DropPages(&fresh);
    if (!status.ok() && p != nullptr) EndBuildLocked(job.sequence, status);
  }
  store_->TellSettled();
}

void WorkRequests::PublishExtents(BuildJob job, BuiltExtents made) {
  RecompressOutput output;
  output.extents = std::move(made.extents);
  std::vector<Page*> fresh;
  const Status status = TakePages(job, output, &fresh);
  {
    MutexLock lock(store_->mu_);
    Pending* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      const auto tokens = static_cast<uint32_t>(job.input.prompt_tokens);
      const Sequence& s = *store_->sequences_.at(job.sequence);
      Artefact artefact{p->artefact,
                        {},
                        std::move(made.recompressor),
                        std::move(made.released),
                        tokens,
                        s.series.Slice(0, tokens)};
      for (size_t i = 0; i < fresh.size(); ++i) {
        const ExtentDraft& draft = output.extents[i];
        artefact.extents.push_back({fresh[i], draft.size(), draft.tokens, ChecksumOf(draft.bytes),
                                    store_->DescriptionFor(*fresh[i], draft.bytes)});
      }
      p->extents = static_cast<uint32_t>(fresh.size());
      if (fresh.empty()) p->recompressor = nullptr;  // nothing is to be packed: too short
      if (!fresh.empty()) store_->EnterArtefact(std::move(artefact));
      if (!fresh.empty() && store_->tier_ != nullptr) store_->tier_->Offer(p->artefact);
      p->running = false;
    }
    DropPages(&fresh);
    if (!status.ok() && p != nullptr) EndBuildLocked(job.sequence, status);
  }
  store_->TellSettled();
}

}  // namespace kvstrata
