// SPDX-License-Identifier: Apache-2.0
// Pieces of builds (build_job.h): what comes next, what a worker gets, how it is entered.
#include <algorithm>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/build_pages.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/recompression.h"
#include "server/store/requests/answers.h"
#include "server/store/requests/build_job.h"

namespace kvstrata {
namespace {

Status BuildOver() { return {Code::kAborted, "BUILD_OVER", "nothing more is to be built"}; }

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
  job.build = p.id;
  job.sequence = sequence;
  job.geometry = s->model->desc.geometry;
  job.plan = p.plan;
  job.index = p.index;
  job.cancelled = p.cancelled;
  if (next.begin < next.end) {
    pages_.FillBlocks(*s, next, &job, staged);
  } else {
    p.artefact = p.ArtefactKey(*s);
    job.recompressor = p.recompressor;
    pages_.FillExtents(*s, &job, staged);
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
  if (const Status read = pages_.Stage(staged, &*job); !read.ok()) {
    AbandonBuild(std::move(*job), read);
    return read;
  }
  return job;
}

void Builds::AbandonBuild(BuildJob job, const Status& why) {
  {
    StoreLock lock(books_.mu);
    pages_.LetGo(job);
    if (PendingOf(job) != nullptr) (void)EndBuildLocked(job.sequence, why);
  }
  answers_.Tell();
}

// --- what becomes of it --------------------------------------------------------------------------

Status Builds::CopyPages(const BuildJob& job, const RecompressOutput& output, FreshPages* fresh) {
  return pages_.Copy(job, output, fresh, [this, &job]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    return PendingOf(job) == nullptr ? BuildOver() : OkStatus();
  });
}

void Builds::PublishBlocks(BuildJob job) {
  RecompressOutput output;
  output.extents = std::move(job.drafts);
  FreshPages fresh;
  Status status = CopyPages(job, output, &fresh);
  {
    StoreLock lock(books_.mu);
    (void)catalog_.FindSequence(job.sequence);  // waits: its blocks are about to change
    PendingBuild* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      Sequence* const s = catalog_.SequenceOf(job.sequence);
      status = pages_.EnterBlocks(s, p->own, job, fresh);
      if (status.ok()) {
        p->built_blocks += static_cast<uint32_t>(fresh.pages.size());
        p->built_to = std::max(p->built_to, job.to);
        p->running = false;
        recompression_.OfferIfDue(s);
      }
    }
    pages_.Discard(&fresh);
    if (!status.ok() && p != nullptr) (void)EndBuildLocked(job.sequence, status);
  }
  answers_.Tell();
}

void Builds::PublishExtents(BuildJob job, BuiltExtents made) {
  RecompressOutput output;
  output.extents = std::move(made.extents);
  FreshPages fresh;
  const Status status = CopyPages(job, output, &fresh);
  {
    StoreLock lock(books_.mu);
    PendingBuild* const p = PendingOf(job);
    if (status.ok() && p != nullptr) {
      p->extents = static_cast<uint32_t>(fresh.pages.size());
      if (fresh.pages.empty()) p->recompressor = nullptr;  // nothing is to be packed: too short
      const Sequence& s = *catalog_.SequenceOf(job.sequence);
      if (!fresh.pages.empty() && !s.chain.is_private()) {
        pages_.EnterExtents(s, p->artefact, job, output, fresh, &made);
      }
      p->running = false;
    }
    pages_.Discard(&fresh);
    if (!status.ok() && p != nullptr) (void)EndBuildLocked(job.sequence, status);
  }
  answers_.Tell();
}

}  // namespace kvstrata
