// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/room_state.h"

#include <algorithm>

#include "base/check.h"

namespace kvstrata {

void RoomState::SetState(Chunk* chunk, ChunkState to) {
  const auto count = [this, chunk](ChunkState state, int by) {
    if (state == ChunkState::kFree) return;
    ChunkAmount& amount = by_state[static_cast<size_t>(state)];
    amount.chunks += static_cast<uint64_t>(by);
    amount.bytes += static_cast<uint64_t>(by) * chunk->row_bytes;
  };
  count(chunk->state, -1);
  count(to, 1);
  chunk->state = to;
}

Chunk* RoomState::Take(uint64_t row_bytes, ChunkState state) {
  Chunk* const chunk = region->Take(row_bytes, [this](Chunk* evicted) {
    KVS_CHECK(evicted->state == ChunkState::kShown && index.erase(evicted->key) == 1);
    SetState(evicted, ChunkState::kFree);
    pressed = std::max(pressed, evicted->use);
    ++options.counters->evicted;
  });
  if (chunk == nullptr) return nullptr;
  chunk->key = {};
  chunk->asked_writes = kNowhere;
  SetState(chunk, state);
  return chunk;
}

void RoomState::Free(Chunk* chunk) {
  SetState(chunk, ChunkState::kFree);
  region->Free(chunk);
}

void RoomState::Settle(Chunk* chunk) {
  if (!chunk->engines.empty() || chunk->writing) return;
  if (chunk->state == ChunkState::kDropped) return Free(chunk);
  if (chunk->state == ChunkState::kShown) region->MakeIdle(chunk);
}

void RoomState::Drop(Chunk* chunk) {
  KVS_CHECK(chunk->place == Chunk::Place::kBusy && index.erase(chunk->key) == 1);
  SetState(chunk, ChunkState::kDropped);
  Settle(chunk);
}

uint64_t RoomState::UseOf(uint64_t first, uint64_t index) {
  constexpr uint64_t kMost = (uint64_t{1} << kUseBits) - 1;
  return first + kMost - std::min(index, kMost);
}

void RoomState::Order(ChunkWork::Kind kind, Chunk* chunk, uint8_t below) {
  work.push_back({kind,
                  below,
                  {options.serial, chunk->row_bytes, chunk->id},
                  chunk->key,
                  region->BytesOf(*chunk),
                  region->keep()});
}

Chunk* RoomState::Find(const ChunkRef& ref) {
  return ref.room == options.serial ? region->Find(ref.row_bytes, ref.id) : nullptr;
}

}  // namespace kvstrata
