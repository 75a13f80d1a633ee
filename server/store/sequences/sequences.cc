// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/sequences.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/recompression.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/references/watermarks.h"
#include "server/store/requests/answers.h"
#include "server/store/sequences/recall_audits.h"
#include "server/store/sequences/sequence_entry.h"
#include "server/store/space/raw_pages.h"

namespace kvstrata {
namespace {

// For what only this sequence refers to.
uint64_t OwnBytes(const Sequence& s) {
  uint64_t bytes = 0;
  const auto add = [&bytes](const Page* page) {
    if (page != nullptr && page->refs == 1) bytes += page->bytes;
  };
  std::ranges::for_each(s.pages, add);
  std::ranges::for_each(s.index_blocks, add);
  for (const Extent& extent : s.extents) add(extent.page);
  return bytes;
}

}  // namespace

Result<OpenedSequence> Sequences::ForkSequence(uint64_t session_id, uint64_t sequence) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(Sequence * parent, catalog_.FindSequence(session_id, sequence));
  KVS_RETURN_IF_ERROR(CheckOwned(*parent));
  KVS_RETURN_IF_ERROR(devices_.CheckHeld(*parent));
  // The parent's table must say that its tail is shared now: reserved before anything changes.
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * parent_table,
                       tables_.ReserveTable(session, *parent, parent->table->page_capacity));
  const LongRequest request(&catalog_, session);
  auto child = std::make_unique<Sequence>(*parent);
  child->key.clear();
  child->place = {};
  child->truncate_to.reset();
  child->table = nullptr;
  child->version = 0;
  child->access_counters = {};
  child->recall = nullptr;
  child->sampled = 0;
  child->held_tokens = parent->tokens;
  if (child->codec) child->codec->OnFork();
  // Pages ahead of the tokens stay the parent's; all index blocks that may have rows are shared.
  const size_t pages = std::min<size_t>(parent->pages.size(), parent->PagesFor(parent->tokens));
  const size_t blocks =
      std::min<size_t>(parent->index_blocks.size(), parent->BlocksFor(parent->tokens));
  child->pages.clear();
  child->index_blocks.clear();
  for (const Extent& extent : child->extents) references_.RefPage(extent.page);
  Result<OpenedSequence> opened = [&]() KVS_REQUIRES(store_lock) {
    const Outside outside(session, child.get());
    references_.RefAll(session, std::span(parent->pages).first(pages), &child->pages);
    references_.RefAll(session, std::span(parent->index_blocks).first(blocks),
                       &child->index_blocks);
    return entry_.Enter(session, std::move(child));
  }();
  if (opened.ok()) {
    tables_.Publish(session, parent, parent_table);
    recompression_.NoteDue(catalog_.SequenceOf(opened->sequence));
  } else {
    session->memory->FreeTable(parent_table);
  }
  references_.Advance(session->tenant);
  return opened;
}

Status Sequences::MakePrivate(uint64_t session, uint64_t sequence) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session, sequence));
  kvstrata::MakePrivate(s);
  return OkStatus();
}

void Sequences::CloseLocked(Session* session, Sequence* s) {
  (void)builds_.EndBuildLocked(
      s->id, Status(Code::kAborted, "SEQUENCE_CLOSED",
                    "sequence " + std::to_string(s->id) + " was closed while it was built for"));
  if (s->codec) {
    s->codec->cancelled->store(true, std::memory_order_relaxed);
    if (recompression_.sink() != nullptr) recompression_.sink()->Withdraw(s->id);
    recompression_.AnswerWaiters(
        s, Status(Code::kAborted, "SEQUENCE_CLOSED",
                  "sequence " + std::to_string(s->id) + " was closed meanwhile"));
  }
  recalls_.StopRecall(s, Status(Code::kAborted, "SEQUENCE_CLOSED",
                                "sequence " + std::to_string(s->id) + " was closed by its client"));
  NoteSelected(*session, *s);
  if (!s->key.empty()) session->tenant->keys.erase(s->key);
  GivePlaceBack(catalog_, s);
  tables_.Unpublish(session, s);
  // Nobody finds it any more: what follows is done in pieces.
  const Outside outside(session, s);
  const std::unique_ptr<Sequence> leaving = catalog_.TakeSequence(session, s);
  // No look-up gets past a page that was released, unless by the prompt's artefact: what lies
  // behind it would be cached in vain.
  const bool artefact = s->codec && books_.artefacts.Contains(s->codec->prompt_key);
  const auto hole =
      artefact ? s->pages.end() : std::find(s->pages.begin(), s->pages.end(), nullptr);
  for (const size_t kept = static_cast<size_t>(hole - s->pages.begin()); s->pages.size() > kept;
       catalog_.LetOthersIn(session, 1)) {
    if (s->pages.back() != nullptr) raw_pages_.DropRaw(s->pages.back());
    s->pages.pop_back();
  }
  prefixes_.OfferKept(*s, OfferedFor::kSealed);
  references_.ReleaseExtents(&s->extents);
  references_.ReleaseAll(session, &s->index_blocks);
  references_.ReleaseAll(session, &s->pages);
}

uint64_t Sequences::CloseAllOf(Session* session) {
  for (const auto& [sequence, s] : session->sequences) {
    recalls_.StopRecall(s.get(), Status(Code::kAborted, "SESSION_ENDED",
                                        "the session of sequence " + std::to_string(sequence) +
                                            " ended: its client detached or died"));
  }
  uint64_t freed_bytes = 0;
  while (!session->sequences.empty()) {
    Sequence* const s = session->sequences.begin()->second.get();
    freed_bytes += OwnBytes(*s);
    CloseLocked(session, s);
  }
  return freed_bytes;
}

Status Sequences::CloseSequence(uint64_t session_id, uint64_t sequence) {
  return answers_.TellAfter([&]() -> Status {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
    Session* session = catalog_.SessionOf(session_id);
    const LongRequest request(&catalog_, session);
    CloseLocked(session, s);
    references_.Advance(session->tenant);
    // What comes back now is still in the caches, for the next sequence.
    references_.ReclaimByPieces(session->tenant);
    watermarks_.NoteFill();
    return OkStatus();
  });
}

}  // namespace kvstrata
