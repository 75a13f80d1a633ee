// SPDX-License-Identifier: Apache-2.0
// Tokens that are taken back: drafts that a verifier rejected, or what an engine resumes below.
#include <algorithm>
#include <string>

#include "kernels/codec/codec.h"
#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/recompression.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/requests/answers.h"
#include "server/store/sequences/sequences.h"

namespace kvstrata {
namespace {

std::string Tokens(uint32_t tokens, const Sequence& s) {
  return "tokens is " + std::to_string(tokens) + "; sequence " + std::to_string(s.id) + " has " +
         std::to_string(s.tokens);
}

// How many leading extents have no token from `tokens` on.
size_t ExtentsWithin(const Sequence& s, uint32_t tokens) {
  const auto end = static_cast<int32_t>(tokens);
  return static_cast<size_t>(
      std::ranges::find_if(s.extents, [end](const Extent& e) { return e.tokens.end > end; }) -
      s.extents.begin());
}

uint32_t EndOf(const Sequence& s, size_t extents) {
  return extents == 0 ? 0 : static_cast<uint32_t>(s.extents[extents - 1].tokens.end);
}

// Whether the extents behind those may go: all rows that are left of them lie on pages, too. Those
// on a GPU stay, since what an engine keeps of them (cuda_hot_rows.h) is not told.
bool DropsExtents(const Sequence& s, uint32_t tokens) {
  if (!CodecOf(s.plan).drops_last) return false;
  const size_t kept = ExtentsWithin(s, tokens);
  const auto is_on_gpu = [](const Extent& e) { return e.description != nullptr; };
  if (std::any_of(s.extents.begin() + static_cast<ptrdiff_t>(kept), s.extents.end(), is_on_gpu)) {
    return false;
  }
  const uint32_t page = s.page_tokens();
  const auto begin = s.pages.begin() + EndOf(s, kept) / page;
  const auto end = s.pages.begin() + s.PagesFor(tokens);
  return std::find(begin, end, nullptr) == end;
}

}  // namespace

Status Sequences::CheckTruncate(const Sequence& s, uint32_t tokens) {
  if (tokens > s.tokens) {
    return InvalidArgument("TRUNCATE_TOKENS", Tokens(tokens, s) + ": allowed is up to that");
  }
  const uint32_t opened_on = s.codec ? s.codec->opened_on : 0;
  const uint32_t prompt = std::max(s.prefill_done ? s.prompt_tokens : 0, opened_on);
  if (tokens < prompt) {
    return FailedPrecondition("TRUNCATE_PROMPT", Tokens(tokens, s) + ", of which " +
                                                     std::to_string(prompt) +
                                                     " are its prompt; open a sequence with the "
                                                     "tokens to keep: it is held for them");
  }
  // Rows of an extent cannot be cut, and a page that was released has left no key.
  uint32_t packed = 0;
  for (const Extent& e : s.extents) packed = std::max(packed, static_cast<uint32_t>(e.tokens.end));
  if (tokens < packed && DropsExtents(s, tokens)) packed = tokens;
  const uint32_t whole = tokens / s.page_tokens();
  const bool keyless = whole > 0 && s.pages[whole - 1] == nullptr &&
                       whole != s.tokens / s.page_tokens() &&
                       !(s.prefill_done && whole == s.prompt_tokens / s.page_tokens());
  if (tokens >= packed && !keyless) return OkStatus();
  return FailedPrecondition("TRUNCATE_PACKED",
                            Tokens(tokens, s) + ", of which the plan's codec has packed " +
                                std::to_string(packed) +
                                "; open a sequence with the tokens to keep, or truncate to no less "
                                "than " +
                                std::to_string(s.tokens / s.page_tokens() * s.page_tokens()));
}

// A run over the prompt alone reads nothing that goes.
void Sequences::EndWorkBeyond(Sequence* s) {
  const Status why(Code::kAborted, "SEQUENCE_TRUNCATED",
                   "tokens of sequence " + std::to_string(s->id) + " were taken back meanwhile");
  (void)builds_.EndBuildLocked(s->id, why);
  if (!s->codec || s->codec->work != CodecState::Work::kRunning) return;
  if (s->prefill_done && !s->codec->prompt_settled) return;
  s->codec->cancelled->store(true, std::memory_order_relaxed);
  s->codec->cancelled = std::make_shared<std::atomic<bool>>(false);
}

// Pages and index blocks beyond `tokens` go but for those that the next tokens may be written to.
std::vector<Page*> Sequences::TakeBeyond(Sequence* s, uint32_t tokens) {
  const uint64_t ahead = uint64_t{tokens} + options_.headroom_tokens;
  std::vector<Page*> taken;
  const auto take = [&](std::vector<Page*>* pages, size_t needed, size_t kept) {
    while (pages->size() > needed && (pages->size() > kept || !Writable(*s, pages->back()))) {
      taken.push_back(pages->back());
      pages->pop_back();
    }
  };
  take(&s->pages, s->PagesFor(tokens), s->PagesFor(ahead));
  take(&s->index_blocks, s->BlocksFor(tokens), s->BlocksFor(ahead));
  return taken;
}

void Sequences::DropExtents(Sequence* s, size_t kept) {
  if (kept == s->extents.size()) return;
  const auto end = static_cast<int32_t>(EndOf(*s, kept));
  std::vector<Extent> gone(s->extents.begin() + static_cast<ptrdiff_t>(kept), s->extents.end());
  s->extents.resize(kept);
  references_.ReleaseExtents(&gone);
  std::vector<Run>& released = s->codec->released;
  for (Run& run : released) run.end = std::min(run.end, end);
  std::erase_if(released, [](const Run& run) { return run.begin >= run.end; });
}

void Sequences::CutLocked(Sequence* s, uint32_t tokens, std::span<const int32_t> tail) {
  const uint32_t page_tokens = s->page_tokens(), whole = tokens / page_tokens;
  if (whole != s->tokens / page_tokens) {
    const bool of_prompt = s->prefill_done && whole == s->prompt_tokens / page_tokens;
    s->last_key = whole == 0  ? PageKey{}
                  : of_prompt ? s->prompt_last_key
                              : s->pages[whole - 1]->key;
  }
  s->tail.assign(tail.begin(), tail.end());
  s->tokens = tokens;
  s->indexed_tokens = std::min(s->indexed_tokens, tokens);
  s->held_tokens = std::min(s->held_tokens, tokens);
  s->series.Truncate(tokens);
}

void Sequences::Wish(Session* session, Sequence* s, std::optional<uint32_t> tokens) {
  s->truncate_to = tokens;
  session->memory->tables()->slots[s->slot].truncate_to.store(tokens ? uint64_t{*tokens} + 1 : 0,
                                                              std::memory_order_release);
}

bool Sequences::EndWish(Session* session, Sequence* s, uint32_t tokens) {
  if (!s->truncate_to || tokens > *s->truncate_to) return false;
  Wish(session, s, std::nullopt);
  return true;
}

Status Sequences::TruncateKey(uint64_t session, std::string_view key, uint32_t tokens) {
  return answers_.TellAfter([&] { return TruncateKeyNow(session, key, tokens); });
}

Status Sequences::TruncateKeyNow(uint64_t session_id, std::string_view key, uint32_t tokens) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(const uint64_t sequence, FindKey(session_id, key));
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(sequence));
  KVS_RETURN_IF_ERROR(CheckOwned(*s));
  KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
  Session* const owner = catalog_.SessionOf(s->session);
  // Commits of a linked owner may be on their way.
  const bool may_have = owner->transport == Transport::kLinked && tokens <= s->capacity_tokens();
  if (tokens <= s->tokens || !may_have) KVS_RETURN_IF_ERROR(CheckTruncate(*s, tokens));
  if (s->truncate_to && *s->truncate_to <= tokens) return OkStatus();
  EndWorkBeyond(s);
  Wish(owner, s, tokens);
  return OkStatus();
}

Status Sequences::Truncate(uint64_t session, uint64_t sequence, uint32_t tokens,
                           std::span<const int32_t> tail) {
  return answers_.TellAfter([&] { return TruncateNow(session, sequence, tokens, tail); });
}

Status Sequences::TruncateNow(uint64_t session_id, uint64_t sequence, uint32_t tokens,
                              std::span<const int32_t> tail) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
  KVS_RETURN_IF_ERROR(CheckOwned(*s));
  KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
  if (const Status refused = CheckTruncate(*s, tokens); !refused.ok()) {
    // Asked for by the key, it could never be done: who is refused has heard it for both.
    if (s->truncate_to == tokens) Wish(session, s, std::nullopt);
    return refused;
  }
  if (tail.size() != tokens % s->page_tokens()) {
    return InvalidArgument("TRUNCATE_TAIL",
                           std::to_string(tail.size()) + " token ids for the tail of " +
                               std::to_string(tokens) +
                               " tokens; needed: " + std::to_string(tokens % s->page_tokens()));
  }
  if (tokens == s->tokens) {
    if (EndWish(session, s, tokens)) recompression_.NoteDue(s);
    return OkStatus();
  }
  const size_t kept = ExtentsWithin(*s, tokens);
  // Pages that were sealed look private in the old table: it says nothing of what came after it.
  KVS_ASSIGN_OR_RETURN(shm::SequenceTable * table,
                       tables_.ReserveTable(session, *s, s->table->page_capacity, kept));
  const LongRequest request(&catalog_, session);
  EndWish(session, s, tokens);
  EndWorkBeyond(s);
  DropExtents(s, kept);
  CutLocked(s, tokens, tail);
  std::vector<Page*> taken = TakeBeyond(s, tokens);
  tables_.Publish(session, s, table);
  references_.ReleaseAll(session, &taken);
  references_.Advance(session->tenant);
  recompression_.NoteDue(s);
  return OkStatus();
}

}  // namespace kvstrata
