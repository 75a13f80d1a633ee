// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/chunk_credits.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

// What one connection is owed at most: more would not be given before others come back.
constexpr uint64_t kMostOwed = uint64_t{1} << 20;
// That wait to be written below; then the oldest are not. Most of them may have been evicted.
constexpr size_t kMostUnsaved = size_t{1} << 18;
// The part of what its layout may take that an idle engine keeps in credits, so that it need not
// wait for its first ones.
constexpr uint64_t kKeptPart = 64;

}  // namespace

// -- credits

Status ChunkCredits::Want(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Counted head{};
  if (!ReadHead(packet, &head) || packet.size() != sizeof(head)) {
    return MalformedPacket("WANT: it has " + std::to_string(packet.size()) + " bytes, not 8");
  }
  claims->owed = std::min(claims->owed + head.count, kMostOwed);
  NoteUse(claims);
  return OkStatus();
}

void ChunkCredits::NoteUse(ChunkClaims* claims) {
  claims->used = state_->NextUse();
  claims->recalled = false;
}

bool ChunkCredits::AtMost(const ChunkClaims& claims) const {
  const uint64_t now = claims.engine->credited_bytes;
  return now > 0 && now + claims.scope.row_bytes > state_->region->most_bytes() / 4;
}

bool ChunkCredits::GiveOne(ChunkClaims* claims, std::vector<int32_t>* ids) {
  const uint64_t row_bytes = claims->scope.row_bytes;
  ChunkEngine* const engine = claims->engine;
  const Chunk* const chunk = state_->Take(row_bytes, ChunkState::kCredited);
  if (chunk == nullptr) return false;
  engine->credited_bytes += row_bytes;
  --claims->owed;
  claims->credits.insert(chunk->id);
  ids->push_back(chunk->id);
  return true;
}

void ChunkCredits::Give(const std::map<uint64_t, std::unique_ptr<ChunkClaims>>& all) {
  state_->starved = 0;
  std::vector<ChunkClaims*> owed;
  for (const auto& [connection, claims] : all) {
    if (claims->owed > 0) owed.push_back(claims.get());
  }
  if (!owed.empty()) GiveInTurn(std::move(owed));
  Recall(all);
}

void ChunkCredits::GiveInTurn(std::vector<ChunkClaims*> owed) {
  // Whoever got the last one is the last in turn.
  std::ranges::rotate(owed,
                      std::ranges::upper_bound(owed, last_served_, {}, &ChunkClaims::connection));
  std::map<ChunkClaims*, std::vector<int32_t>> given;
  while (!owed.empty()) {
    std::erase_if(owed, [&](ChunkClaims* claims) {
      if (AtMost(*claims)) return true;
      if (!GiveOne(claims, &given[claims])) {
        ++state_->starved;
        state_->pressed = std::max(state_->pressed, claims->used);
        return true;
      }
      last_served_ = claims->connection;
      return claims->owed == 0;
    });
  }
  for (const auto& [claims, ids] : given) {
    ForEachPart(std::span<const int32_t>(ids), [&](auto part) {
      const chunks::Counted head{chunks::Type::kCredits, static_cast<uint32_t>(part.size())};
      state_->packets.push_back(NewPacket(claims->connection, head, part));
    });
  }
}

void ChunkCredits::Recall(const std::map<uint64_t, std::unique_ptr<ChunkClaims>>& all) {
  if (state_->pressed == recalled_to_) return;
  recalled_to_ = state_->pressed;
  for (const auto& [connection, claims] : all) {
    const uint64_t has = claims->credits.size();
    const uint64_t kept =
        std::max<uint64_t>(1, state_->region->most_bytes() / kKeptPart / claims->scope.row_bytes);
    if (claims->recalled || claims->used >= state_->pressed || has <= kept) continue;
    claims->recalled = true;
    const chunks::Counted head{chunks::Type::kRecall, static_cast<uint32_t>(has - kept)};
    state_->packets.push_back(NewPacket(connection, head, std::span<const int32_t>()));
  }
}

Chunk* ChunkCredits::TakeBack(ChunkClaims* claims, int32_t id) {
  if (claims->credits.erase(id) == 0) return nullptr;
  claims->engine->credited_bytes -= claims->scope.row_bytes;
  Chunk* const chunk = state_->region->Find(claims->scope.row_bytes, id);
  KVS_CHECK(chunk != nullptr && chunk->state == ChunkState::kCredited);
  return chunk;
}

Status ChunkCredits::Return(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Counted head{};
  std::vector<int32_t> ids;
  if (!ReadList(packet, &head, &ids)) return MalformedPacket("RETURN: its size and count differ");
  for (const int32_t id : ids) {
    Chunk* const chunk = TakeBack(claims, id);
    if (chunk == nullptr) {
      return MalformedPacket("RETURN: " + std::to_string(id) + " is no credit of this connection");
    }
    state_->Free(chunk);
  }
  return OkStatus();
}

void ChunkCredits::ReturnAll(ChunkClaims* claims) {
  claims->owed = 0;
  const std::vector<int32_t> ids(claims->credits.begin(), claims->credits.end());
  for (const int32_t id : ids) state_->Free(TakeBack(claims, id));
}

// -- complete chunks

Status ChunkCredits::Store(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Counted head{};
  std::vector<chunks::StoredChunk> stored;
  if (!ReadList(packet, &head, &stored))
    return MalformedPacket("STORED: its size and count differ");
  if (!claims->has_space) return MalformedPacket("STORED before SPACE");
  NoteUse(claims);
  const uint64_t use = claims->used;
  for (size_t i = 0; i < stored.size(); ++i) {
    Chunk* const chunk = TakeBack(claims, stored[i].id);
    if (chunk == nullptr) {
      return MalformedPacket("STORED: " + std::to_string(stored[i].id) +
                             " is no credit of this connection");
    }
    const ChunkKey key = ChunkKeyOf(claims->scope, stored[i].key);
    RoomState::Entry& entry = state_->index[key];
    if (entry.chunk != nullptr) {
      ++state_->options.counters->duplicates;
      state_->Free(chunk);
      continue;
    }
    ++state_->options.counters->stored;
    state_->options.counters->stored_bytes += chunk->row_bytes;
    entry.chunk = chunk;
    chunk->key = key;
    chunk->use = RoomState::UseOf(use, i);
    state_->SetState(chunk, ChunkState::kSumming);
    state_->Order(ChunkWork::Kind::kSum, chunk);
  }
  return OkStatus();
}

void ChunkCredits::Show(Chunk* chunk, const Checksum& sum) {
  chunk->sum = sum;
  state_->SetState(chunk, ChunkState::kShown);
  leases_->Arrive(chunk);
}

void ChunkCredits::OnSummed(const ChunkRef& ref, const Checksum& sum) {
  Chunk* const chunk = state_->Find(ref);
  if (chunk == nullptr) return;
  Show(chunk, sum);
  Save(chunk, state_->options.write_shown);
}

// -- below

void ChunkCredits::Save(Chunk* chunk, uint8_t below) {
  const uint8_t missing = below & ~chunk->asked_writes;
  if (missing == kNowhere) return;
  chunk->asked_writes |= missing;
  if (unsaved_.size() == kMostUnsaved) {
    ++state_->options.counters->unsaved;
    unsaved_.pop_front();
  }
  unsaved_.push_back({{state_->options.serial, chunk->row_bytes, chunk->id}, chunk->key, missing});
  SaveNext();
}

bool ChunkCredits::saves() const {
  return writing_.chunks > 0 || !unsaved_.empty() || Unsummed().chunks > 0;
}

ChunkAmount ChunkCredits::Unsummed() const {
  const bool written = state_->options.write_shown != kNowhere;
  return written ? state_->by_state[static_cast<size_t>(ChunkState::kSumming)] : ChunkAmount();
}

ChunkAmount ChunkCredits::Unwritten() const {
  ChunkAmount all = Unsummed();
  all.chunks += writing_.chunks;
  all.bytes += writing_.bytes;
  for (const Saving& saving : unsaved_) {
    const Chunk* const chunk = Find(saving);
    if (chunk == nullptr) continue;
    ++all.chunks;
    all.bytes += chunk->row_bytes;
  }
  return all;
}

void ChunkCredits::SaveReused() {
  for (Chunk* chunk : std::exchange(state_->reused, {})) Save(chunk, state_->options.write_reused);
}

Chunk* ChunkCredits::Find(const Saving& saving) const {
  Chunk* const chunk = state_->Find(saving.chunk);
  const bool there =
      chunk != nullptr && chunk->state == ChunkState::kShown && chunk->key == saving.key;
  return there ? chunk : nullptr;
}

void ChunkCredits::SaveNext() {
  while (!unsaved_.empty()) {
    const Saving& next = unsaved_.front();
    Chunk* const chunk = Find(next);
    if (chunk == nullptr) {
      ++state_->options.counters->unsaved;
      unsaved_.pop_front();
      continue;
    }
    const uint64_t bytes = writing_.bytes + chunk->row_bytes;
    if (chunk->writing || (writing_.chunks > 0 && bytes > state_->options.writing_bytes)) return;
    ++writing_.chunks;
    writing_.bytes = bytes;
    chunk->writing = true;
    if (chunk->place == Chunk::Place::kIdle) state_->region->MakeBusy(chunk);
    state_->Order(ChunkWork::Kind::kVerify, chunk, next.below);
    unsaved_.pop_front();
  }
}

void ChunkCredits::EndSaving(Chunk* chunk) {
  chunk->writing = false;
  --writing_.chunks;
  writing_.bytes -= chunk->row_bytes;
  state_->Settle(chunk);
  SaveNext();
}

void ChunkCredits::OnVerified(const ChunkRef& ref, const Checksum& sum, uint8_t below) {
  Chunk* const chunk = state_->Find(ref);
  if (chunk == nullptr) return;
  if (sum == chunk->sum) return state_->Order(ChunkWork::Kind::kWrite, chunk, below);
  ++state_->options.counters->changed;
  LogEvent(LogLevel::kError, "chunk_changed",
           {{"id", chunk->id},
            {"row_bytes", chunk->row_bytes},
            {"uid", state_->options.user},
            {"why",
             "an engine wrote to a chunk that it had stored; nobody is given it any more, and no "
             "tier gets it"}});
  state_->Drop(chunk);
  EndSaving(chunk);
}

void ChunkCredits::OnWritten(const ChunkRef& ref, bool ok) {
  Chunk* const chunk = state_->Find(ref);
  if (chunk == nullptr) return;
  ChunkCounters* const counters = state_->options.counters;
  counters->write_failures += !ok;
  counters->written += ok;
  counters->written_bytes += ok ? chunk->row_bytes : 0;
  EndSaving(chunk);
}

void ChunkCredits::OnRead(const ChunkRef& ref, const std::optional<Checksum>& sum, uint8_t below) {
  Chunk* const chunk = state_->Find(ref);
  if (chunk == nullptr) return;
  ChunkCounters* const counters = state_->options.counters;
  if (!sum) {
    ++counters->read_failures;
    return leases_->Miss(chunk->key);  // OnLetGo frees it
  }
  ++counters->read;
  counters->read_bytes += chunk->row_bytes;
  chunk->asked_writes = below;
  Show(chunk, *sum);
  Save(chunk, state_->options.write_shown);
}

void ChunkCredits::OnLetGo(const ChunkRef& ref) {
  if (Chunk* const chunk = state_->Find(ref); chunk != nullptr) state_->Free(chunk);
}

void ChunkCredits::OnProbed(const ChunkRef& ref, const ChunkKey& key, uint8_t below) {
  --state_->probes;
  const auto entry = state_->index.find(key);
  if (entry == state_->index.end()) return;
  if (entry->second.chunk != nullptr) return;  // an engine has stored it meanwhile
  Chunk* const chunk =
      below == kNowhere ? nullptr : state_->Take(ref.row_bytes, ChunkState::kReading);
  if (chunk == nullptr) return leases_->Miss(key);
  chunk->key = key;
  chunk->use = state_->NextUse();
  state_->index.at(key).chunk = chunk;
  state_->Order(ChunkWork::Kind::kRead, chunk, below);
}

}  // namespace kvstrata
