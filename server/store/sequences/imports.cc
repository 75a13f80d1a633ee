// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/imports.h"

#include <new>
#include <string>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"
#include "server/store/sequences/step_events.h"

namespace kvstrata {

// Pages are held from the first unit on that the new tokens may complete.
void Imports::KeepPages(const Sequence& s, ImportJob* job) {
  const uint32_t page_tokens = s.page_tokens();
  uint32_t first_row = s.tokens;
  size_t first_block = 0;
  if (s.index.kind != IndexLayout::Kind::kNone) {
    first_block = s.indexed_tokens / static_cast<uint32_t>(s.index.block_tokens);
    first_row = static_cast<uint32_t>(first_block) * static_cast<uint32_t>(s.index.block_tokens);
  }
  job->pages.resize(s.pages.size());
  job->blocks.resize(s.index_blocks.size());
  const auto keep = [&](Page* page, bool written, std::byte** address)
                        KVS_NO_THREAD_SAFETY_ANALYSIS {
                          if (page == nullptr) return;
                          holds_.Keep(job->hold, page);
                          if (books_.memory.readable(page->arena->tier)) {
                            *address = page->base();
                          } else {
                            job->staged.push_back({page, address, written, nullptr});
                          }
                        };
  for (size_t i = first_row / page_tokens; i < s.pages.size(); ++i) {
    keep(s.pages[i], i >= s.tokens / page_tokens, &job->pages[i]);
  }
  for (size_t i = first_block; i < s.index_blocks.size(); ++i) {
    keep(s.index_blocks[i], true, &job->blocks[i]);
  }
}

Status Imports::StageImport(ImportJob* job) {
  for (ImportJob::Staged& s : job->staged) {
    s.copy.reset(new (std::nothrow) std::byte[s.page->bytes]);
    if (s.copy == nullptr) {
      return ResourceExhausted("MEMORY_EXHAUSTED", "no host memory for a page of an import");
    }
    KVS_RETURN_IF_ERROR(books_.memory.Read(*s.page, s.copy.get()));
    *s.address = s.copy.get();
  }
  return OkStatus();
}

Result<ImportJob> Imports::BeginImport(uint64_t session_id, uint64_t sequence, uint32_t tokens) {
  ImportJob job;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
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
    KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
    Session* session = catalog_.SessionOf(session_id);
    const LongRequest request(&catalog_, session);
    KVS_RETURN_IF_ERROR(steps_.ExtendLocked(session, s, s->tokens + uint64_t{tokens}));
    job.hold = holds_.Begin();
    job.session = session_id;
    job.sequence = sequence;
    job.geometry = s->model->desc.geometry;
    job.plan = s->plan;
    job.index = s->index;
    job.tokens = s->tokens;
    job.indexed_tokens = s->indexed_tokens;
    KeepPages(*s, &job);
  }
  if (const Status staged = StageImport(&job); !staged.ok()) {
    AbandonImport(job);
    return staged;
  }
  return job;
}

Status Imports::FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                             uint32_t indexed_tokens) {
  Status written;
  for (const ImportJob::Staged& s : job.staged) {
    if (s.written && written.ok()) written = books_.memory.Write(*s.page, s.copy.get());
  }
  AbandonImport(job);
  KVS_RETURN_IF_ERROR(written);
  return steps_.Commit(job.session, job.sequence, job.tokens, tokens, indexed_tokens, true);
}

void Imports::AbandonImport(const ImportJob& job) {
  StoreLock lock(books_.mu);
  holds_.End(job.hold);
}

}  // namespace kvstrata
