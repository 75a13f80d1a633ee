// Imported sequences (import_job.h): which models' sequences are, their jobs.
#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "server/store/long_request.h"

namespace kvstrata {

Status Store::Impl::CheckOwned(const Sequence& s) {
  if (!s.imported) return OkStatus();
  return FailedPrecondition("SEQUENCE_IMPORTED",
                            "sequence " + std::to_string(s.id) +
                                " is imported: the daemon fills its pages from the tensors that "
                                "this session registered; seal blocks, and run steps on a sequence "
                                "of another session");
}

Result<Geometry> Store::Impl::ModelGeometry(uint64_t session_id, uint64_t model) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(const Session::KnownModel* known, FindModel(*session, model));
  return known->first->desc.geometry;
}

Status Store::Impl::ImportModel(uint64_t session_id, uint64_t model) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  KVS_RETURN_IF_ERROR(FindModel(*session, model).status());
  session->imports.insert(model);
  return OkStatus();
}

// Pages are pinned from the first unit on that the new tokens may complete.
void Store::Impl::PinImport(const Sequence& s, ImportJob* job) {
  const uint32_t page_tokens = s.page_tokens();
  uint32_t first_row = s.tokens;
  size_t first_block = 0;
  if (s.index.kind != IndexLayout::Kind::kNone) {
    first_block = s.indexed_tokens / static_cast<uint32_t>(s.index.block_tokens);
    first_row = static_cast<uint32_t>(first_block) * static_cast<uint32_t>(s.index.block_tokens);
  }
  job->pages.resize(s.pages.size());
  job->blocks.resize(s.index_blocks.size());
  std::vector<Page*>& pins = jobs_[job->id];
  const auto pin = [&](Page* page, bool written, std::byte** address)
                       KVS_NO_THREAD_SAFETY_ANALYSIS {
                         if (page == nullptr) return;
                         ++page->jobs;
                         pins.push_back(page);
                         if (pools_.readable(page->arena->tier)) {
                           *address = page->base();
                         } else {
                           job->staged.push_back({page, address, written, nullptr});
                         }
                       };
  for (size_t i = first_row / page_tokens; i < s.pages.size(); ++i) {
    pin(s.pages[i], i >= s.tokens / page_tokens, &job->pages[i]);
  }
  for (size_t i = first_block; i < s.index_blocks.size(); ++i) {
    pin(s.index_blocks[i], true, &job->blocks[i]);
  }
}

Status Store::Impl::StageImport(ImportJob* job) {
  for (ImportJob::Staged& s : job->staged) {
    s.copy.reset(new (std::nothrow) std::byte[s.page->bytes]);
    if (s.copy == nullptr) {
      return ResourceExhausted("MEMORY_EXHAUSTED", "no host memory for a page of an import");
    }
    KVS_RETURN_IF_ERROR(ReadPage(*s.page, s.copy.get()));
    *s.address = s.copy.get();
  }
  return OkStatus();
}

Result<ImportJob> Store::Impl::BeginImport(uint64_t session_id, uint64_t sequence,
                                           uint32_t tokens) {
  ImportJob job;
  {
    MutexLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Sequence * s, FindSequence(session_id, sequence));
    if (!s->imported) {
      return FailedPrecondition("SEQUENCE_OWNED",
                                "sequence " + std::to_string(sequence) +
                                    " was opened before its model's tensors were registered; open "
                                    "it again");
    }
    if (s->tokens + uint64_t{tokens} > kMaxSequenceTokens) {
      return InvalidArgument("SEQUENCE_TOO_LONG", std::to_string(tokens) + " tokens behind " +
                                                      std::to_string(s->tokens) +
                                                      "; allowed: at most " +
                                                      std::to_string(kMaxSequenceTokens));
    }
    KVS_RETURN_IF_ERROR(CheckHeld(*s));
    Session* session = sessions_.at(session_id).get();
    const LongRequest request(this, session);
    KVS_RETURN_IF_ERROR(ExtendLocked(session, s, s->tokens + uint64_t{tokens}));
    job.id = next_job_++;
    job.session = session_id;
    job.sequence = sequence;
    job.geometry = s->model->desc.geometry;
    job.plan = s->plan;
    job.index = s->index;
    job.tokens = s->tokens;
    job.indexed_tokens = s->indexed_tokens;
    PinImport(*s, &job);
  }
  if (const Status staged = StageImport(&job); !staged.ok()) {
    AbandonImport(job);
    return staged;
  }
  return job;
}

Status Store::Impl::FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                                 uint32_t indexed_tokens) {
  Status written;
  for (const ImportJob::Staged& s : job.staged) {
    if (s.written && written.ok()) written = WritePage(*s.page, s.copy.get());
  }
  AbandonImport(job);
  KVS_RETURN_IF_ERROR(written);
  return CommitRows(job.session, job.sequence, job.tokens, tokens, indexed_tokens, true);
}

void Store::Impl::AbandonImport(const ImportJob& job) {
  MutexLock lock(mu_);
  UnpinJob(job.id);
}

}  // namespace kvstrata
