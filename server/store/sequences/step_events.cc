// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/step_events.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/codec_extents.h"
#include "server/store/codecs/recompression.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/sequences/recall_audits.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/page_copies.h"

namespace kvstrata {
namespace {

// How fast the engine computes prompts, waits in its queue included: what an open from a remote
// tier has to beat.
void NotePrefillRate(const Sequence& s) {
  constexpr uint32_t kFewest = 256;  // fewer say how long a step takes, and no rate
  constexpr double kNewest = 0.25;
  const uint32_t computed = s.prompt_tokens - std::min(s.held_tokens, s.prompt_tokens);
  const std::chrono::duration<double> took = Clock::now() - s.opened;
  if (computed < kFewest || took.count() <= 0) return;
  const double rate = computed / took.count();
  double& known = s.model->prefill_rate;
  known = known == 0 ? rate : known + kNewest * (rate - known);
}

}  // namespace

Status StepEvents::ExtendLocked(Session* session, Sequence* s, uint64_t tokens) {
  const size_t old_pages = s->pages.size(), old_blocks = s->index_blocks.size();
  const uint32_t want_pages = s->PagesFor(tokens), want_blocks = s->BlocksFor(tokens);
  if (want_pages <= old_pages && want_blocks <= old_blocks) return OkStatus();
  KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
  shm::SequenceTable* table = nullptr;
  if (want_pages > s->table->page_capacity || want_blocks > s->table->index_capacity) {
    KVS_ASSIGN_OR_RETURN(
        table,
        tables_.ReserveTable(session, *s, std::max(want_pages, 2 * s->table->page_capacity)));
  }
  if (const Status status = allocator_.TakeUpTo(session, s, tokens); !status.ok()) {
    if (table != nullptr) session->memory->FreeTable(table);
    return status;
  }
  if (table == nullptr) {
    tables_.PublishInPlace(session, s);
  } else {
    tables_.Publish(session, s, table);
    references_.Advance(session->tenant);
  }
  return OkStatus();
}

CopyPlan StepEvents::PlanPrivateCopies(Session* session, const Sequence& s, uint32_t writable,
                                       uint32_t index_writable, bool* stale_flags) const {
  CopyPlan plan;
  const shm::PageEntry* entries = shm::Entries(s.table);
  *stale_flags = false;
  const auto visit = [&](Page* page, const shm::PageEntry& entry, bool index, size_t position,
                         uint64_t rows) KVS_NO_THREAD_SAFETY_ANALYSIS {
    catalog_.LetOthersIn(session, 1);
    if (page == nullptr) return;  // released, hence full: nobody writes there
    if (!Writable(s, page)) {
      PlannedCopy& planned = plan.copies.emplace_back();
      planned.source = page;
      planned.index = index;
      planned.position = static_cast<uint32_t>(position);
      planned.rows = static_cast<uint32_t>(rows);
    } else if ((entry.flags & shm::kPageShared) != 0) {
      *stale_flags = true;  // it was shared once; the others have gone
    }
  };
  const uint64_t page_tokens = s.page_tokens();
  for (size_t i = writable / page_tokens; i < s.pages.size(); ++i) {
    const uint64_t begin = i * page_tokens;
    visit(s.pages[i], entries[i], false, i,
          s.tokens <= begin ? 0 : std::min(page_tokens, s.tokens - begin));
  }
  if (s.index.kind == IndexLayout::Kind::kNone) return plan;
  entries += s.table->page_capacity;
  for (size_t i = index_writable / static_cast<uint32_t>(s.index.block_tokens);
       i < s.index_blocks.size(); ++i) {
    visit(s.index_blocks[i], entries[i], true, i, 0);
  }
  return plan;
}

Status StepEvents::Grow(uint64_t session_id, uint64_t sequence, uint32_t tokens, uint32_t writable,
                        uint32_t index_writable) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens));
  CopyPlan plan;
  Geometry geometry;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
    KVS_RETURN_IF_ERROR(CheckOwned(*s));
    KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
    Session* session = catalog_.SessionOf(session_id);
    if (writable / s->page_tokens() < s->tokens / s->page_tokens()) {
      return InvalidArgument("GROW_SEALED",
                             "writable is " + std::to_string(writable) +
                                 ", in a page that is full; allowed: from " +
                                 std::to_string(s->tokens / s->page_tokens() * s->page_tokens()));
    }
    geometry = s->model->desc.geometry;
    const LongRequest request(&catalog_, session);
    bool stale_flags = false;
    plan = PlanPrivateCopies(session, *s, writable, index_writable, &stale_flags);
    // All or nothing: copies first, because extending is the last thing that can fail.
    KVS_RETURN_IF_ERROR(copies_.TakeCopies(session, TakerOf(*session, *s), &plan, s->tokens));
    if (const Status status = ExtendLocked(session, s, tokens); !status.ok()) {
      copies_.Discard(&plan);
      return status;
    }
    if (plan.copies.empty()) {
      if (!stale_flags) return OkStatus();
      KVS_ASSIGN_OR_RETURN(shm::SequenceTable * table,
                           tables_.ReserveTable(session, *s, s->table->page_capacity));
      tables_.Publish(session, s, table);
      references_.Advance(session->tenant);
      return OkStatus();
    }
  }
  return copies_.CopyAndSwapIn(session_id, sequence, geometry, &plan).status();
}

void StepEvents::KeepSeries(const Sequence& s, Page* page, size_t n, Series series) {
  if (page->series != nullptr && SameSeries(*page->series, series)) return;
  page->series = std::make_unique<Series>(std::move(series));
  page->series_changed = true;
  if (page->indexed) prefixes_.EnterPrefix(s, page, n, OfferedFor::kReported);
}

// What was reported of a sealed page's positions goes with the page: whoever is held for it has it
// too. Where another page of the same tokens is the one that is found, it takes what it lacks.
void StepEvents::KeepSeriesWithPages(Session* session, Sequence* s, uint32_t first, uint32_t end) {
  if (s->series.empty() || s->chain.is_private()) return;
  const uint32_t page_tokens = s->page_tokens();
  for (uint32_t i = first / page_tokens; i * page_tokens < end && i < s->pages.size(); ++i) {
    catalog_.LetOthersIn(session, 1);
    Page* page = s->pages[i];
    if (page == nullptr || !page->sealed) continue;
    Series series = s->series.Slice(i * page_tokens, page_tokens);
    Page* const found = page->indexed ? nullptr : books_.prefix.Find(page->key);
    const size_t known = found == nullptr || found->series == nullptr ? 0 : found->series->Count();
    if (found != nullptr && known < series.Count()) KeepSeries(*s, found, i, series);
    KeepSeries(*s, page, i, std::move(series));
  }
}

void StepEvents::CommitLocked(Session* session, Sequence* s, std::span<const PageKey> keys,
                              std::span<const int32_t> tokens, uint32_t indexed_tokens) {
  const size_t first = s->tokens / s->page_tokens();
  for (size_t i = 0; i < keys.size(); ++i) {
    Page* page = s->pages[first + i];
    page->key = keys[i];
    page->sealed = true;
    if (first + i == GroupBegin(first + i)) {
      s->groups.resize((first + i) / kGroupPages);
      s->groups.push_back(keys[i]);
    }
    prefixes_.EnterPrefix(*s, page, first + i);
    catalog_.LetOthersIn(session, 1);
  }
  KeepSeriesWithPages(session, s, s->tokens, s->tokens + static_cast<uint32_t>(tokens.size()));
  s->tokens += static_cast<uint32_t>(tokens.size());
  const size_t behind = s->tokens % s->page_tokens();
  if (!keys.empty()) {
    s->last_key = keys.back();
    s->tail.clear();
  }
  const size_t more = std::min(behind - std::min(behind, s->tail.size()), tokens.size());
  s->tail.insert(s->tail.end(), tokens.end() - static_cast<ptrdiff_t>(more), tokens.end());
  SealIndex(session, s, indexed_tokens);
  const uint64_t ahead =
      std::min<uint64_t>(uint64_t{s->tokens} + options_.headroom_tokens, kMaxSequenceTokens);
  // The tokens are in; that there is no room for more is told when more is asked for.
  if (s->capacity_tokens() < ahead) (void)ExtendLocked(session, s, ahead);
  recompression_.NoteDue(s);
}

void StepEvents::SealIndex(Session* session, Sequence* s, uint32_t indexed_tokens) {
  s->indexed_tokens = std::max(s->indexed_tokens, indexed_tokens);
  if (!s->SharesIndex()) return;
  const uint32_t block_tokens = static_cast<uint32_t>(s->index.block_tokens);
  for (uint32_t i = s->indexed_tokens / block_tokens; i-- > 0;) {
    Page* block = s->index_blocks[i];
    if (block->sealed) break;  // so are those before it
    if (!Writable(*s, block)) continue;
    const size_t last = size_t{i + 1} * block_tokens / s->page_tokens() - 1;
    const Page* const last_page = s->pages[last];
    if (last_page == nullptr) continue;  // released, and its key with it
    block->key = IndexBlockKey(last_page->key, s->index);
    block->sealed = block->summary = true;
    prefixes_.EnterPrefix(*s, block, last);
    catalog_.LetOthersIn(session, 1);
  }
}

// A sequence that opened on an artefact is held for that prompt alone.
Status StepEvents::CheckPromised(const Sequence& s, std::span<const int32_t> tokens) {
  if (!s.codec || s.tokens >= s.codec->opened_on) return OkStatus();
  const std::span<const int32_t> promised = s.codec->promised;
  const std::span<const int32_t> left =
      promised.last(std::min<size_t>(promised.size(), s.codec->opened_on - s.tokens));
  const size_t n = std::min(left.size(), tokens.size());
  if (std::ranges::equal(left.first(n), tokens.first(n))) return OkStatus();
  return FailedPrecondition("COMMIT_OTHER_PROMPT",
                            "tokens from position " + std::to_string(s.tokens) +
                                " are not those that sequence " + std::to_string(s.id) +
                                " was opened with, and it is held for those alone; open it again");
}

Status StepEvents::CheckCommit(Session* session, const Sequence& s, uint32_t first,
                               std::span<const int32_t> tokens, uint32_t indexed_tokens) const {
  const size_t n = tokens.size();
  if (first != s.tokens) {
    return FailedPrecondition("COMMIT_OUT_OF_ORDER", "first is " + std::to_string(first) +
                                                         "; sequence " + std::to_string(s.id) +
                                                         " has " + std::to_string(s.tokens) +
                                                         " tokens");
  }
  if (first + uint64_t{n} > s.capacity_tokens()) {
    return InvalidArgument("COMMIT_BEYOND_TABLE",
                           "tokens up to " + std::to_string(first + uint64_t{n}) +
                               "; the table covers " + std::to_string(s.capacity_tokens()) +
                               ": grow it before the step");
  }
  if (indexed_tokens > first + uint64_t{n} || s.BlocksFor(indexed_tokens) > s.index_blocks.size()) {
    return InvalidArgument("COMMIT_INDEX", "indexed_tokens is " + std::to_string(indexed_tokens) +
                                               "; allowed: at most the tokens, " +
                                               std::to_string(first + uint64_t{n}));
  }
  KVS_RETURN_IF_ERROR(CheckPromised(s, tokens));
  for (uint64_t at = first / s.page_tokens(); n > 0 && at < s.PagesFor(first + uint64_t{n}); ++at) {
    catalog_.LetOthersIn(session, 1);
    if (Writable(s, s.pages[at])) continue;
    return FailedPrecondition(
        "COMMIT_TO_SHARED",
        "page " + std::to_string(at) + " is shared and may not be written; grow makes it private");
  }
  return OkStatus();
}

Status StepEvents::Commit(uint64_t session_id, uint64_t sequence, uint32_t first,
                          std::span<const int32_t> tokens, uint32_t indexed_tokens,
                          bool by_daemon) {
  std::vector<int32_t> ids;
  KeyChain chain;
  PageKey parent;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
    if (!by_daemon) KVS_RETURN_IF_ERROR(CheckOwned(*s));
    Session* session = catalog_.SessionOf(session_id);
    const LongRequest request(&catalog_, session);
    KVS_RETURN_IF_ERROR(CheckCommit(session, *s, first, tokens, indexed_tokens));
    if (!by_daemon && !tokens.empty()) {
      ++s->steps;
      session->last_step = Clock::now();
    }
    if (!by_daemon && tokens.size() == 1 && s->prefill_done) recalls_.NoteDecode(session, s);
    if (s->tail.size() + tokens.size() < s->page_tokens()) {
      CommitLocked(session, s, {}, tokens, indexed_tokens);
      return OkStatus();
    }
    ids = s->tail;
    chain = s->chain;
    parent = s->last_key;
  }
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  const std::vector<PageKey> keys = chain.Pages(parent, ids);  // hashed outside of the lock
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
  Session* session = catalog_.SessionOf(session_id);
  const LongRequest request(&catalog_, session);
  KVS_RETURN_IF_ERROR(CheckCommit(session, *s, first, tokens, indexed_tokens));
  CommitLocked(session, s, keys, tokens, indexed_tokens);
  return OkStatus();
}

namespace {

constexpr uint32_t kReportedAtOnce = 4096;  // positions: some 100 us under the lock

template <typename T>
std::vector<T> PieceOf(const T* values, uint32_t first, uint32_t n) {
  return values == nullptr ? std::vector<T>() : std::vector<T>(values + first, values + first + n);
}

Status CheckSeries(std::string_view field, uint32_t first, uint32_t n, const float* values) {
  for (uint32_t i = 0; values != nullptr && i < n; ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    return InvalidArgument("REPORT_VALUE", std::string(field) + " of position " +
                                               std::to_string(first + uint64_t{i}) + " is " +
                                               std::to_string(values[i]) +
                                               "; allowed: finite, not negative (nats)");
  }
  return OkStatus();
}

}  // namespace

Status StepEvents::Report(uint64_t session_id, uint64_t sequence, uint32_t first, uint32_t n,
                          const float* surprisal, const float* entropy, const uint8_t* boundary) {
  KVS_RETURN_IF_ERROR(CheckSeries("surprisal", first, n, surprisal));
  KVS_RETURN_IF_ERROR(CheckSeries("entropy", first, n, entropy));
  // By pieces: whoever reports much must not keep the lock from others.
  uint32_t done = 0;
  do {
    const uint32_t some = std::min(n - done, kReportedAtOnce);
    KVS_RETURN_IF_ERROR(ReportSome(session_id, sequence, first, n, done, some,
                                   {PieceOf(surprisal, done, some), PieceOf(entropy, done, some),
                                    PieceOf(boundary, done, some)}));
    done += some;
  } while (done < n);
  return OkStatus();
}

Status StepEvents::ReportSome(uint64_t session_id, uint64_t sequence, uint32_t first, uint32_t n,
                              uint32_t done, uint32_t some, const Series& piece) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
  if (uint64_t{first} + n > s->tokens) {
    return InvalidArgument("REPORT_POSITION", "positions " + std::to_string(first) + " to " +
                                                  std::to_string(uint64_t{first} + n) +
                                                  " (exclusive); sequence " +
                                                  std::to_string(sequence) + " has " +
                                                  std::to_string(s->tokens) + " tokens");
  }
  s->series.Put(first + done, piece);
  KeepSeriesWithPages(catalog_.SessionOf(session_id), s, first + done, first + done + some);
  if (done + some == n) recompression_.NoteDue(s);
  return OkStatus();
}

Status StepEvents::PrefillDone(uint64_t session_id, uint64_t sequence) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
  if (s->prefill_done || s->tokens == 0) {
    return FailedPrecondition("PREFILL_DONE",
                              "sequence " + std::to_string(sequence) +
                                  (s->prefill_done ? " has ended its prompt already"
                                                   : " is empty: commit its prompt first"));
  }
  if (s->codec && s->tokens < s->codec->opened_on) {
    return FailedPrecondition("PREFILL_DONE", "sequence " + std::to_string(sequence) +
                                                  " was opened with a prompt of " +
                                                  std::to_string(s->codec->opened_on) +
                                                  " tokens and is held for it alone: commit all");
  }
  s->prefill_done = true;
  s->prompt_tokens = s->tokens;
  s->prompt_last_key = s->last_key;
  NotePrefillRate(*s);
  if (s->codec) {
    extents_.AttachArtefact(catalog_.SessionOf(session_id), s);
    recompression_.NoteDue(s);
  }
  return OkStatus();
}

}  // namespace kvstrata
