// SPDX-License-Identifier: Apache-2.0
// ChunkRegion: one user's memory for chunks: a sealed memfd that the daemon and the user's engines
// map, cut into slabs, each of which belongs to rows of one size at a time.
//
// Chunk `id` of row size R lies at byte id * R, so that engines of any row size address the whole
// region. A chunk is there when every slab that it touches belongs to its row size; at most two do,
// since no row is larger than a slab. It is free, busy (somebody's, never evicted) or idle (may be
// evicted, the smallest `use` first).
//
// Take finds room in this order: a free chunk of that size, a slab that nobody has, and then what
// was not used for longest: an idle chunk of that size, or a whole slab of another size that has no
// busy chunk.
//
// Ownership: chunks are the region's; a pointer to one is good while it is busy. `keep` owns the
// memory for whoever still reads or writes it, and may outlive the region. Thread-safety: none.
// Errors of Make: CHUNKS_MEMORY (RESOURCE_EXHAUSTED). Cost: Take is O(slabs + log chunks).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/chunks/room/chunk.h"

namespace kvstrata {

struct MappedMemory;

class ChunkRegion {
 public:
  // `bytes`: as chunks.bytes gives them, a multiple of 4096. `layout_percent`: of its slabs, what
  // rows of one size may have; at least one row, whatever it is.
  static Result<std::unique_ptr<ChunkRegion>> Make(uint64_t bytes, uint32_t layout_percent = 100);
  // What a slab has in a region of that size, which has 64 of them or fewer.
  static uint64_t SlabBytes(uint64_t region_bytes);

  uint64_t bytes() const;
  uint64_t most_bytes() const;  // room that rows of one size may take
  int fd() const;               // maps it for reading and writing
  std::span<std::byte> BytesOf(const Chunk& chunk) const;
  std::shared_ptr<void> keep() const;

  // A busy chunk that was free; null: all room is busy. `evicted` is told of each idle chunk that
  // goes for it, before it is gone. REQUIRES: row_bytes is at most a slab's.
  Chunk* Take(uint64_t row_bytes, const std::function<void(Chunk*)>& evicted);
  // Null: there is none of that size and number.
  Chunk* Find(uint64_t row_bytes, int32_t id);
  // The first chunk that begins at byte `*at` or behind, which `*at` is behind then; null: none.
  const Chunk* NextFrom(uint64_t* at) const;
  void Free(Chunk* chunk);
  void MakeBusy(Chunk* chunk);
  // It may be evicted, in the order of chunk->use.
  void MakeIdle(Chunk* chunk);

 private:
  friend struct ChunkRoomTestPeer;
  struct Slab {
    uint64_t row_bytes = 0;  // 0: nobody's
    uint32_t busy = 0, idle = 0;
    uint64_t newest = 0;  // use of what was idle in it
  };
  using Order = std::set<std::pair<uint64_t, int32_t>>;  // use, id
  struct Rows {
    std::unordered_map<int32_t, Chunk> chunks;
    std::set<int32_t> free;
    Order idle;
    uint32_t slabs = 0;
  };

  ChunkRegion(std::shared_ptr<MappedMemory> memory, uint32_t layout_percent);

  uint64_t EndOf(size_t slab) const;
  // The slabs that row `id` touches: [first, second).
  std::pair<size_t, size_t> SlabsOf(uint64_t row_bytes, int32_t id) const;
  // The rows that touch a slab, of those that end within the region: [first, second).
  std::pair<int32_t, int32_t> RowsOf(uint64_t row_bytes, size_t slab) const;
  size_t FindUnowned(uint64_t row_bytes) const;  // slabs_.size(): none
  size_t FindOldest(uint64_t row_bytes) const;   // a slab of other rows without a busy chunk
  void Own(uint64_t row_bytes, size_t slab);
  void Disown(size_t slab, const std::function<void(Chunk*)>& evicted);
  bool MakeRoom(uint64_t row_bytes, const std::function<void(Chunk*)>& evicted);
  void Move(Chunk* chunk, Chunk::Place to);

  const std::shared_ptr<MappedMemory> memory_;
  const uint64_t slab_bytes_;
  std::vector<Slab> slabs_;
  const uint64_t most_slabs_;      // slabs that rows of one size may have
  std::map<uint64_t, Rows> rows_;  // by row size
};

}  // namespace kvstrata
