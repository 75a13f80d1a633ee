// SPDX-License-Identifier: Apache-2.0
#include "session/sequence_tables.h"

#include <algorithm>
#include <string>
#include <vector>

#include "session/member_codes.h"

namespace kvstrata {
namespace {

// Grow publishes a table that holds the claim, unless something else changes it in between.
constexpr int kEnterAttempts = 4;

uint32_t PagesFor(const Geometry& g, int32_t tokens) {
  return static_cast<uint32_t>((int64_t{tokens} + g.page_tokens - 1) / g.page_tokens);
}

Status TableInvalid(uint64_t sequence) {
  return {Code::kDataLoss, "TABLE_INVALID",
          "the table of sequence " + std::to_string(sequence) +
              " is gone or breaks bounds; close the sequence or attach anew"};
}

Status ClosedByKey(uint64_t sequence) {
  return NotFound("SEQUENCE_CLOSED", "sequence " + std::to_string(sequence) +
                                         " was closed by its key, by another session of its user");
}

Status RestLost(const SessionSequence& s, const shm::ExtentEntry& e) {
  return {Code::kDataLoss, "REST_LOST",
          "sequence " + std::to_string(s.id) + " opened on the upper planes of its tokens " +
              std::to_string(e.begin) + " to " + std::to_string(e.end) +
              ", and the others did not come from the tier; close it and open it again: what the "
              "tier has not is computed"};
}

// Blocks that the store completed are not made again.
void TakeIndex(SessionSequence* s) {
  SequenceState& state = *s->state;
  if (state.index().kind == IndexLayout::Kind::kNone) return;
  const auto own = static_cast<uint32_t>(state.indexed_tokens());
  const uint32_t indexed =
      shm::IndexedTokens(s->table, static_cast<uint32_t>(state.index().block_tokens), own,
                         static_cast<uint32_t>(state.tokens()));
  if (indexed == own) return;  // what these steps indexed themselves the store may not know yet
  state.NoteIndexed(static_cast<int32_t>(indexed));
  s->told_indexed = std::max(s->told_indexed, indexed);
}

}  // namespace

Status SequenceTables::LoadExtents(const shm::TableView& view, SessionSequence* s) {
  s->extents.clear();
  if (!shm::ExtentsSound(view)) return TableInvalid(s->id);
  s->extents.reserve(view.extents());
  for (uint32_t i = 0; i < view.extents(); ++i) {
    const shm::ExtentEntry& e = *view.extent(i);
    if ((e.flags & shm::kExtentRestLost) != 0) return RestLost(*s, e);
    KVS_ASSIGN_OR_RETURN(const std::byte* const at,
                         memory_.Resolve({e.arena, 0, e.tier, e.offset}, e.bytes));
    s->extents.push_back({at, static_cast<int64_t>(e.bytes), {e.begin, e.end}});
    s->extents.back().rest_due = (e.flags & shm::kExtentRestDue) != 0;
    if (!memory_.on_gpu() || e.tier != 0) continue;
    const DeviceRead read = [this](std::byte* to, const std::byte* from, uint64_t bytes) {
      return memory_.Read(to, from, bytes);
    };
    KVS_RETURN_IF_ERROR(s->descriptions.Describe(read, &s->extents.back()));
  }
  s->descriptions.KeepOnly(s->extents);
  return OkStatus();
}

Status SequenceTables::LoadPages(SessionSequence* s) {
  const auto bytes = static_cast<uint64_t>(s->state->geometry().page_bytes());
  for (auto i = static_cast<uint32_t>(s->pages.size()); i < s->table.pages; ++i) {
    const shm::PageEntry& entry = *s->table.page(i);
    std::byte* at = nullptr;
    if ((entry.flags & shm::kPageAbsent) == 0) {
      KVS_ASSIGN_OR_RETURN(at, memory_.Resolve(entry, bytes));
    }
    const bool on_host = memory_.on_gpu() && entry.tier != 0;
    s->pages.push_back(at);
    s->host_pages.push_back(on_host ? 1 : 0);
    s->has_host_pages |= on_host;
  }
  return OkStatus();
}

Status SequenceTables::LoadBlocks(SessionSequence* s) {
  const auto bytes = static_cast<uint64_t>(s->state->index().block_bytes);
  for (auto i = static_cast<uint32_t>(s->blocks.size()); i < s->table.index_blocks; ++i) {
    KVS_ASSIGN_OR_RETURN(std::byte* const at, memory_.Resolve(*s->table.index_block(i), bytes));
    s->blocks.push_back(at);
  }
  return OkStatus();
}

Status SequenceTables::Load(SessionSequence* s) {
  const shm::TableView view = reader_.Read(s->slot, s->id);
  if (view.table == nullptr && reader_.Closed(s->slot, s->id)) return ClosedByKey(s->id);
  if (view.table == nullptr) return TableInvalid(s->id);
  if (view.table->version != s->version) {
    s->pages.clear();
    s->host_pages.clear();
    s->has_host_pages = false;
    s->blocks.clear();
    // Extents of one table and the next are never in the same place, but for those that are kept.
    if (view.table->version != s->version + 1) s->descriptions.Clear();
    s->version = 0;  // until all of it was loaded
    KVS_RETURN_IF_ERROR(LoadExtents(view, s));
    s->version = view.table->version;
  }
  s->table = view;
  KVS_RETURN_IF_ERROR(LoadPages(s));
  return LoadBlocks(s);
}

bool SequenceTables::Holds(const TableClaim& claim) {
  const SessionSequence& s = *claim.sequence;
  const SequenceState& state = *s.state;
  const uint32_t pages = PagesFor(state.geometry(), claim.tokens_after);
  if (pages > s.table.pages) return false;
  if (claim.tokens_after > state.tokens()) {
    const auto first = static_cast<uint32_t>(state.tokens() / state.geometry().page_tokens);
    for (uint32_t i = first; i < pages; ++i) {
      if (!memory_.Writable(*s.table.page(i))) return false;
    }
  }
  const IndexLayout& index = state.index();
  if (index.kind == IndexLayout::Kind::kNone) return true;
  const auto blocks = static_cast<uint32_t>(index.BlocksFor(state.tokens()));
  if (blocks > s.table.index_blocks) return false;
  if (!claim.write_index) return true;
  const auto first = static_cast<uint32_t>(state.indexed_tokens() / index.block_tokens);
  for (uint32_t i = first; i < blocks; ++i) {
    if (!memory_.Writable(*s.table.index_block(i))) return false;
  }
  return true;
}

Result<SequenceTables::EnteredEpoch> SequenceTables::Enter(std::span<const TableClaim> claims,
                                                           int32_t* codes) {
  for (int attempt = 0; attempt < kEnterAttempts; ++attempt) {
    const int slot = reader_.Enter();
    if (slot < 0) {
      return ResourceExhausted("STEPS_OPEN", std::to_string(shm::kMaxReaders) +
                                                 " steps of this session are open; end one");
    }
    EnteredEpoch entered(&reader_, slot);
    MemberCodes failed(codes);
    std::vector<size_t> wanting;
    for (size_t i = 0; i < claims.size(); ++i) {
      if (const Status loaded = Load(claims[i].sequence); !loaded.ok()) {
        failed.Add(i, loaded);
        continue;
      }
      TakeIndex(claims[i].sequence);
      if (!Holds(claims[i])) wanting.push_back(i);
    }
    if (failed.first().ok() && wanting.empty()) return entered;
    // The store may need memory that this epoch keeps: leave it before asking.
    { const EnteredEpoch leave(std::move(entered)); }
    for (const size_t i : wanting) {
      if (const Status grown = memory_.Grow(claims[i]); !grown.ok()) failed.Add(i, grown);
    }
    KVS_RETURN_IF_ERROR(failed.first());
  }
  return Internal("TABLE_NOT_GROWN",
                  "the store said that it grew a sequence's table, but it still does not cover "
                  "what was asked for");
}

std::optional<uint32_t> SequenceTables::TruncateTo(const SessionSequence& s) const {
  const std::optional<uint32_t> asked = reader_.TruncateTo(s.slot, s.id);
  if (!asked) return std::nullopt;
  return std::min(*asked, static_cast<uint32_t>(s.state->tokens()));
}

}  // namespace kvstrata
