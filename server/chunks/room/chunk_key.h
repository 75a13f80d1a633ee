// SPDX-License-Identifier: Apache-2.0
// The key of a chunk: what of a user's chunk makes its bytes, in 32 bytes. The room's index and the
// tiers below go by it. Pure functions; any thread. Cost: two blocks of SHA-256.
#ifndef KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_KEY_H_
#define KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_KEY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "proto/chunk_messages.h"

namespace kvstrata {

using ChunkKey = std::array<uint8_t, 32>;

// The key is a hash already.
struct ChunkKeyHash {
  size_t operator()(const ChunkKey& key) const {
    size_t first;
    std::memcpy(&first, key.data(), sizeof(first));
    return first;
  }
};

// What all keys of one connection share.
struct ChunkScope {
  uint32_t user = 0;
  chunks::Hash space{};
  uint64_t row_bytes = 0;
};

// SHA-256 over "kvstrata chunk 1", user (u32), space, hash, group (u32), row_bytes (u64), all
// little-endian.
ChunkKey ChunkKeyOf(const ChunkScope& scope, const chunks::AskedKey& asked);

// Its key in tiers.
std::string TierKeyOf(const ChunkKey& key);
// And back; nothing: it is no chunk's.
std::optional<ChunkKey> ChunkKeyFrom(std::string_view tier_key);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_KEY_H_
