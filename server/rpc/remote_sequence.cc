#include "server/rpc/remote_sequence.h"

#include <algorithm>
#include <string>

namespace kvstrata {
namespace {

// Grow publishes a table that holds the claim, unless something else changes it in between.
constexpr int kAttempts = 4;

bool Private(const shm::PageEntry& entry) {
  return (entry.flags & (shm::kPageShared | shm::kPageSealed | shm::kPageAbsent)) == 0;
}

bool Holds(const TableClaim& claim) {
  const RemoteSequence& s = *claim.sequence;
  const SequenceState& state = *s.state;
  const int32_t page_tokens = state.geometry().page_tokens;
  const auto pages =
      static_cast<uint32_t>((int64_t{claim.tokens_after} + page_tokens - 1) / page_tokens);
  if (pages > s.table.pages) return false;
  if (claim.tokens_after > state.tokens()) {
    for (auto i = static_cast<uint32_t>(state.tokens() / page_tokens); i < pages; ++i) {
      if (!Private(*s.table.page(i))) return false;
    }
  }
  const IndexLayout& index = state.index();
  if (index.kind == IndexLayout::Kind::kNone) return true;
  const auto blocks = static_cast<uint32_t>(index.BlocksFor(state.tokens()));
  if (blocks > s.table.index_blocks) return false;
  if (!claim.write_index) return true;
  for (auto i = static_cast<uint32_t>(state.indexed_tokens() / index.block_tokens); i < blocks;
       ++i) {
    if (!Private(*s.table.index_block(i))) return false;
  }
  return true;
}

// Blocks that a build completed are not made again.
void TakeIndex(RemoteSequence* s) {
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

Status ClosedByKey(uint64_t sequence) {
  return NotFound("SEQUENCE_CLOSED", "sequence " + std::to_string(sequence) +
                                         " was closed by its key, by another session of its user");
}

}  // namespace

SequenceTables::SequenceTables(Store* store, StepDevice* device, const SessionSegments& segments)
    : store_(store),
      device_(device),
      session_(segments.session),
      reader_(segments.header, segments.tables, segments.table_bytes) {}

Result<std::byte*> SequenceTables::Resolve(uint32_t arena, uint16_t tier, uint64_t offset) {
  // Ids of arenas are never used again, and one that a pinned table names is mapped.
  if (arena != last_arena_ || last_base_ == nullptr) {
    last_base_ = nullptr;  // until all of it is known
    if (tier != 0) KVS_RETURN_IF_ERROR(device_->Reach(arena));
    last_base_ = store_->ArenaBase(arena);
    last_arena_ = arena;
  }
  if (last_base_ == nullptr) {
    return Internal("TABLE_INVALID", "a published table names arena " + std::to_string(arena) +
                                         ", which does not exist");
  }
  return last_base_ + offset;
}

Status SequenceTables::LoadExtents(RemoteSequence* s, const shm::TableView& view) {
  s->extents.clear();
  for (uint32_t i = 0; i < view.extents(); ++i) {
    const shm::ExtentEntry& e = *view.extent(i);
    KVS_ASSIGN_OR_RETURN(const std::byte* const at, Resolve(e.arena, e.tier, e.offset));
    s->extents.push_back({at, static_cast<int64_t>(e.bytes), {e.begin, e.end}});
    if (!device_->on_gpu() || e.tier != 0) continue;
    const FarRead read = [this](std::byte* to, const std::byte* from, uint64_t bytes) {
      return device_->Read(to, from, bytes);
    };
    KVS_RETURN_IF_ERROR(s->descriptions.Describe(read, &s->extents.back()));
  }
  s->descriptions.KeepOnly(s->extents);
  return OkStatus();
}

Status SequenceTables::LoadPage(RemoteSequence* s, const shm::PageEntry& entry) {
  std::byte* at = nullptr;
  if ((entry.flags & shm::kPageAbsent) == 0) {
    KVS_ASSIGN_OR_RETURN(at, Resolve(entry.arena, entry.tier, entry.offset));
  }
  const bool far = device_->on_gpu() && entry.tier != 0;
  s->pages.push_back(at);
  s->far_pages.push_back(far ? 1 : 0);
  s->has_far_pages |= far;
  return OkStatus();
}

Status SequenceTables::Load(RemoteSequence* s) {
  const shm::TableView view = reader_.Read(s->slot, s->id);
  if (view.table == nullptr && reader_.Closed(s->slot, s->id)) return ClosedByKey(s->id);
  if (view.table == nullptr) {
    return Internal("TABLE_INVALID",
                    "the table of sequence " + std::to_string(s->id) + " is not there; close it");
  }
  if (view.table->version != s->version) {
    s->pages.clear();
    s->far_pages.clear();
    s->has_far_pages = false;
    s->blocks.clear();
    // Extents of one table and the next are never in the same place, but for those that are kept.
    if (view.table->version != s->version + 1) s->descriptions.Clear();
    s->version = 0;  // until all of it was loaded
    KVS_RETURN_IF_ERROR(LoadExtents(s, view));
    s->version = view.table->version;
  }
  s->table = view;
  for (auto i = static_cast<uint32_t>(s->pages.size()); i < view.pages; ++i) {
    KVS_RETURN_IF_ERROR(LoadPage(s, *view.page(i)));
  }
  for (auto i = static_cast<uint32_t>(s->blocks.size()); i < view.index_blocks; ++i) {
    const shm::PageEntry& entry = *view.index_block(i);
    KVS_ASSIGN_OR_RETURN(std::byte* const at, Resolve(entry.arena, entry.tier, entry.offset));
    s->blocks.push_back(at);
  }
  return OkStatus();
}

Result<SequenceTables::Pinned> SequenceTables::Pin(std::span<const TableClaim> claims,
                                                   std::vector<int32_t>* codes) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const int slot = reader_.Enter();
    if (slot < 0) {
      return ResourceExhausted("STEPS_OPEN", std::to_string(shm::kMaxReaders) +
                                                 " steps of this session are open; end one");
    }
    Pinned pinned(&reader_, slot);
    std::vector<size_t> wanting;
    for (size_t i = 0; i < claims.size(); ++i) {
      KVS_RETURN_IF_ERROR(Load(claims[i].sequence));
      TakeIndex(claims[i].sequence);
      if (!Holds(claims[i])) wanting.push_back(i);
    }
    if (wanting.empty()) return pinned;
    // The store may need memory that this epoch pins: leave it before asking.
    { Pinned leave(std::move(pinned)); }
    Status failed;
    for (const size_t i : wanting) {
      const SequenceState& state = *claims[i].sequence->state;
      const Status grown = store_->Grow(
          session_, claims[i].sequence->id, static_cast<uint32_t>(claims[i].tokens_after),
          static_cast<uint32_t>(state.tokens()), static_cast<uint32_t>(state.indexed_tokens()));
      if (grown.ok()) continue;
      if (codes != nullptr) {
        codes->resize(claims.size());
        (*codes)[i] = static_cast<int32_t>(grown.code());
      }
      if (failed.ok()) failed = grown;
    }
    KVS_RETURN_IF_ERROR(failed);
  }
  return Internal("TABLE_NOT_GROWN", "a table was grown, but does not cover what was asked for");
}

}  // namespace kvstrata
