// SPDX-License-Identifier: Apache-2.0
#include "server/store/codecs/build_pages.h"

#include <algorithm>
#include <new>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"

namespace kvstrata {
namespace {

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

}  // namespace

void BuildPages::ReadLocked(Page* page, BuildJob* job, std::byte** address,
                            std::vector<StagedPage>* staged) {
  holds_.Keep(job->hold, page);
  if (books_.memory.readable(page->arena->tier)) {
    *address = page->base();
  } else {
    staged->push_back({page, address, nullptr});
  }
}

void BuildPages::FillBlocks(const Sequence& s, Run rows, BuildJob* job,
                            std::vector<StagedPage>* staged) {
  job->hold = holds_.Begin();
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

void BuildPages::FillExtents(const Sequence& s, BuildJob* job, std::vector<StagedPage>* staged) {
  job->hold = holds_.Begin();
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

Status BuildPages::Stage(const std::vector<StagedPage>& staged, BuildJob* job) const {
  for (const StagedPage& s : staged) {
    std::byte* to = s.to;
    if (s.address != nullptr) {
      to = new (std::nothrow) std::byte[s.page->bytes];
      if (to == nullptr) return NoHostMemory();
      job->staged.emplace_back(to);
      *s.address = to;
    }
    KVS_RETURN_IF_ERROR(books_.memory.Read(*s.page, to));
  }
  return OkStatus();
}

void BuildPages::LetGo(const BuildJob& job) { holds_.End(job.hold); }

Status BuildPages::Copy(const BuildJob& job, const RecompressOutput& output, FreshPages* fresh,
                        const std::function<Status()>& check) {
  {
    StoreLock lock(books_.mu);
    LetGo(job);  // read already
    KVS_RETURN_IF_ERROR(check());
    KVS_RETURN_IF_ERROR(extents_.TakeExtents(*catalog_.SequenceOf(job.sequence), output, fresh));
  }
  return extents_.CopyDrafts(output, *fresh, PoolId::Host());
}

void BuildPages::Discard(FreshPages* fresh) { extents_.Discard(fresh); }

Status BuildPages::EnterBlocks(Sequence* s, bool own, const BuildJob& job,
                               const FreshPages& fresh) {
  Session* const session = catalog_.SessionOf(s->session);
  shm::SequenceTable* table = nullptr;
  if (own) {
    KVS_ASSIGN_OR_RETURN(table, tables_.ReserveTable(session, *s, s->table->page_capacity));
  }
  const auto block = static_cast<uint32_t>(job.index.block_tokens);
  for (size_t i = 0; i < fresh.pages.size(); ++i) {
    Page* const page = fresh.pages[i];
    page->key = job.keys[i];
    page->summary = true;
    const size_t last = size_t{job.from / block + i + 1} * block / s->page_tokens() - 1;
    prefixes_.EnterPrefix(*s, page, last);
    if (!own) continue;
    Page* const there = books_.prefix.FindFor(session->device, job.keys[i]);
    Page* const use = there == nullptr ? page : there;
    Page*& at = s->index_blocks[job.from / block + i];
    references_.RefPage(use);
    references_.Release(at);
    at = use;
  }
  if (!own) return OkStatus();
  s->indexed_tokens = std::max(s->indexed_tokens, job.to);
  tables_.Publish(session, s, table);
  return OkStatus();
}

void BuildPages::EnterExtents(const Sequence& s, const PageKey& key, const BuildJob& job,
                              const RecompressOutput& output, const FreshPages& fresh,
                              BuiltExtents* made) {
  const auto tokens = static_cast<uint32_t>(job.input.prompt_tokens);
  Artefact artefact{key,
                    {},
                    std::move(made->recompressor),
                    std::move(made->released),
                    tokens,
                    s.series.Slice(0, tokens)};
  for (size_t i = 0; i < fresh.pages.size(); ++i) {
    const ExtentDraft& draft = output.extents[i];
    artefact.extents.push_back({fresh.pages[i], draft.size(), draft.tokens,
                                ChecksumInHeader(draft.bytes),
                                extents_.DescriptionFor(*fresh.pages[i], draft.bytes)});
  }
  extents_.EnterArtefact(std::move(artefact));
  extents_.OfferArtefact(key, OfferedFor::kArtefact);
}

}  // namespace kvstrata
