// SPDX-License-Identifier: Apache-2.0
// Pieces of builds (build_job.h): what comes next, what a worker gets, how it is entered.
#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/store/answers.h"
#include "server/store/books.h"
#include "server/store/build_job.h"
#include "server/store/builds.h"
#include "server/store/codec_extents.h"
#include "server/store/page_holds.h"
#include "server/store/page_references.h"
#include "server/store/prefix_catalog.h"
#include "server/store/recompression.h"
#include "server/store/sequence.h"
#include "server/store/session_catalog.h"
#include "server/store/tables.h"

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

ExtentDraft DraftOf(uint64_t bytes, uint32_t from, uint32_t to, Tier tier) {
  ExtentDraft draft;
  draft.bytes.resize(bytes);
  draft.tokens = {static_cast<int32_t>(from), static_cast<int32_t>(to)};
  draft.tier = tier;
  return draft;
}

// Copies what the host cannot read, or is added to, to the host.
Status Stage(const PageMemory& memory, BuildJob* job, const std::vector<StagedPage>& staged) {
  for (const StagedPage& s : staged) {
    std::byte* to = s.to;
    if (s.address != nullptr) {
      to = new (std::nothrow) std::byte[s.page->bytes];
      if (to == nullptr) return NoHostMemory();
      job->staged.emplace_back(to);
      *s.address = to;
    }
    KVS_RETURN_IF_ERROR(memory.Read(*s.page, to));
  }
  return OkStatus();
}

}  // namespace

// --- what comes next -----------------------------------------------------------------------------

PendingBuild* Builds::PendingOf(const BuildJob& job) {
  const auto found = builds_.find(job.sequence);
  return found == builds_.end() || found->second.id != job.build ? nullptr : &found->second;
}

Run Builds::NextBlocks(const Sequence& s, PendingBuild* p) const {
  const auto block = static_cast<uint32_t>(p->index.block_tokens);
  if (p->index.kind == IndexLayout::Kind::kNone || block % s.page_tokens() != 0) return {};
  const uint32_t end = s.tokens / block * block;
  const uint32_t device = catalog_.SessionOf(s.session)->device;
  const auto there = [&](uint32_t to) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const Page& last = *s.pages[to / s.page_tokens() - 1];
    return books_.prefix.FindFor(device, IndexBlockKey(last.key, p->index)) != nullptr;
  };
  if (!p->own) {
    while (p->built_to < end && there(p->built_to + block)) p->built_to += block;
  }
  const uint32_t from = p->own ? s.indexed_tokens : p->built_to;
  if (from >= end) return {};
  const uint64_t bytes = uint64_t{block / s.page_tokens()} *
                         static_cast<uint64_t>(s.model->desc.geometry.page_bytes());
  const auto blocks = static_cast<uint32_t>(std::max<uint64_t>(BuildJob::kPieceBytes / bytes, 1));
  const uint64_t to = (uint64_t{from / block} + blocks) * block;
  return {static_cast<int32_t>(from), static_cast<int32_t>(std::min<uint64_t>(to, end))};
}

// --- what a worker gets --------------------------------------------------------------------------

void Builds::ReadLocked(Page* page, BuildJob* job, std::byte** address,
                        std::vector<StagedPage>* staged) {
  holds_.Keep(job->hold, page);
  if (books_.memory.readable(page->arena->tier)) {
    *address = page->base();
  } else {
    staged->push_back({page, address, nullptr});
  }
}

void Builds::FillBlocks(const Sequence& s, Run rows, BuildJob* job,
                        std::vector<StagedPage>* staged) {
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
  holds_.Keep(job->hold, begun);
  staged->push_back({begun, nullptr, job->blocks[first]});
}

void Builds::FillExtents(const Sequence& s, const PendingBuild& p, BuildJob* job,
                         std::vector<StagedPage>* staged) {
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

Result<BuildJob> Builds::TakeLocked(uint64_t sequence, std::vector<StagedPage>* staged) {
  const auto found = builds_.find(sequence);
  if (found == builds_.end() || found->second.running) return BuildOver();
  PendingBuild& p = found->second;
  Sequence* const s = catalog_.SequenceOf(sequence);
  if (const Status inputs = CheckInputs(*s, p); !inputs.ok()) {
    (void)EndBuildLocked(sequence, inputs);
    return BuildOver();
  }
  const Run next = NextBlocks(*s, &p);
  if (next.begin == next.end && !p.WantsExtents()) {
    BuildResult result = p.ResultFor(*s);
    std::vector<BuildDone> waiters = std::move(p.waiters);
    const bool own = p.own;
    builds_.erase(found);
    if (!own || FinishLocked(s, &result, waiters)) AnswerLocked(std::move(waiters), result);
    return BuildOver();
  }
  if (!p.begun) p.since = Clock::now();
  p.begun = p.running = true;
  BuildJob job;
  job.hold = holds_.Begin();
  job.build = p.id;
  job.sequence = sequence;
  job.geometry = s->model->desc.geometry;
  job.plan = p.plan;
  job.index = p.index;
  job.cancelled = p.cancelled;
  if (next.begin < next.end) {
    FillBlocks(*s, next, &job, staged);
  } else {
    p.artefact = p.ArtefactKey(*s);
    FillExtents(*s, p, &job, staged);
  }
  return job;
}

Result<BuildJob> Builds::TakeBuild(uint64_t sequence) {
  std::vector<StagedPage> staged;
  Result<BuildJob> job = [&]() -> Result<BuildJob> {
    StoreLock lock(books_.mu);
    return TakeLocked(sequence, &staged);
  }();
  answers_.Tell();
  if (!job.ok()) return job;
  if (const Status read = Stage(books_.memory, &*job, staged); !read.ok()) {
    AbandonBuild(std::move(*job), read);
    return read;
  }
  return job;
}

void Builds::AbandonBuild(BuildJob job, const Status& why) {
  {
    StoreLock lock(books_.mu);
    holds_.End(job.hold);
    if (PendingOf(job) != nullptr) (void)EndBuildLocked(job.sequence, why);
  }
  answers_.Tell();
}

// --- what becomes of it --------------------------------------------------------------------------

Status Builds::TakePages(const BuildJob& job, const RecompressOutput& output, FreshPages* fresh) {
  {
    StoreLock lock(books_.mu);
    holds_.End(job.hold);  // read already
    if (PendingOf(job) == nullptr) return BuildOver();
    KVS_RETURN_IF_ERROR(extents_.TakeExtents(*catalog_.SequenceOf(job.sequence), output, fresh));
  }
  return extents_.CopyDrafts(output, *fresh, PoolId::Host());
}

void Builds::EnterBlocks(Sequence* s, PendingBuild* p, const BuildJob& job,
                         std::span<Page* const> fresh) {
  const auto block = static_cast<uint32_t>(job.index.block_tokens);
  const uint32_t device = catalog_.SessionOf(s->session)->device;
  for (size_t i = 0; i < fresh.size(); ++i) {
    fresh[i]->key = job.keys[i];
    fresh[i]->summary = true;
    const size_t last = size_t{job.from / block + i + 1} * block / s->page_tokens() - 1;
    prefixes_.EnterPrefix(*s, fresh[i], last);
    if (!p->own) continue;
    Page* const there = books_.prefix.FindFor(device, job.keys[i]);
    Page* const use = there == nullptr ? fresh[i] : there;
    Page*& at = s->index_blocks[job.from / block + i];
    references_.RefPage(use);
    references_.Release(at);
    at = use;
  }
  p->built_blocks += static_cast<uint32_t>(fresh.size());
  p->built_to = std::max(p->built_to, job.to);
  p->running = false;
  if (p->own) s->indexed_tokens = std::max(s->indexed_tokens, job.to);
}

void Builds::PublishBlocks(BuildJob job) {
  RecompressOutput output;
  output.extents = std::move(job.drafts);
  FreshPages fresh;
  Status status = TakePages(job, output, &fresh);
  {
    StoreLock lock(books_.mu);
    (void)catalog_.FindSequence(job.sequence);  // waits: its blocks are about to change
    PendingBuild* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      Sequence* const s = catalog_.SequenceOf(job.sequence);
      Session* const session = catalog_.SessionOf(s->session);
      const Result<shm::SequenceTable*> table =
          p->own ? tables_.ReserveTable(session, *s, s->table->page_capacity)
                 : Result<shm::SequenceTable*>(nullptr);
      status = table.status();
      if (status.ok()) {
        EnterBlocks(s, p, job, fresh.pages);
        if (p->own) tables_.Publish(session, s, *table);
        recompression_.OfferIfDue(s);
      }
    }
    extents_.Discard(&fresh);
    if (!status.ok() && p != nullptr) (void)EndBuildLocked(job.sequence, status);
  }
  answers_.Tell();
}

void Builds::PublishExtents(BuildJob job, BuiltExtents made) {
  RecompressOutput output;
  output.extents = std::move(made.extents);
  FreshPages fresh;
  const Status status = TakePages(job, output, &fresh);
  {
    StoreLock lock(books_.mu);
    PendingBuild* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      const auto tokens = static_cast<uint32_t>(job.input.prompt_tokens);
      const Sequence& s = *catalog_.SequenceOf(job.sequence);
      Artefact artefact{p->artefact,
                        {},
                        std::move(made.recompressor),
                        std::move(made.released),
                        tokens,
                        s.series.Slice(0, tokens)};
      for (size_t i = 0; i < fresh.pages.size(); ++i) {
        const ExtentDraft& draft = output.extents[i];
        artefact.extents.push_back({fresh.pages[i], draft.size(), draft.tokens,
                                    ChecksumInHeader(draft.bytes),
                                    extents_.DescriptionFor(*fresh.pages[i], draft.bytes)});
      }
      p->extents = static_cast<uint32_t>(fresh.pages.size());
      if (fresh.pages.empty()) p->recompressor = nullptr;  // nothing is to be packed: too short
      if (!fresh.pages.empty() && !s.chain.is_private()) {
        extents_.EnterArtefact(std::move(artefact));
        extents_.OfferArtefact(p->artefact, OfferedFor::kArtefact);
      }
      p->running = false;
    }
    extents_.Discard(&fresh);
    if (!status.ok() && p != nullptr) (void)EndBuildLocked(job.sequence, status);
  }
  answers_.Tell();
}

}  // namespace kvstrata
