// SPDX-License-Identifier: Apache-2.0
// The disk tier's bytes (docs/disk_format.md): blocks as PODs, how they are sealed and checked.
//
// Thread-safety: values and pure functions. Cost: a checksum of 4 KiB for each block, and of the
// whole payload for a value.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/checksum.h"

namespace kvstrata::disk {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kBlockBytes = 4096;
inline constexpr uint32_t kMaxKeyBytes = 64;
inline constexpr uint32_t kMaxBuffers = 16;
inline constexpr uint32_t kFirstSlotBlock = 2;  // behind the two copies of the superblock

using StoreId = std::array<uint8_t, 16>;

inline uint64_t BlocksOf(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

// Payload blocks of the smallest size class that holds `blocks`: at most 1/16 more.
uint64_t ClassOf(uint64_t blocks);

// Blocks of a value's payload, and of the slot that it needs, from its buffers' bytes.
uint64_t PayloadBlocks(std::span<const uint64_t> sizes);
uint32_t SlotBlocks(std::span<const uint64_t> sizes);

struct Superblock {
  static constexpr uint64_t kMagic = 0x31304745'5353564B;  // "KVSSEG01"
  Checksum checksum;
  uint64_t magic;
  uint32_t version;
  uint32_t segment;
  StoreId store;
  uint64_t sequence;
  uint64_t dirty_after;
  uint64_t segment_bytes;
  uint32_t slot_blocks;
  uint8_t zero[4020];
};
static_assert(sizeof(Superblock) == kBlockBytes && offsetof(Superblock, store) == 32 &&
              offsetof(Superblock, sequence) == 48 && offsetof(Superblock, slot_blocks) == 72);

enum class SlotState : uint32_t { kValue = 1, kErased = 2 };

struct SlotHeader {
  static constexpr uint64_t kMagic = 0x31544F4C'5353564B;  // "KVSSLOT1"
  struct Buffer {
    uint64_t bytes;
    Checksum checksum;
  };
  std::string_view key_view() const { return {key, key_bytes}; }

  Checksum checksum;
  uint64_t magic;
  uint32_t version;
  SlotState state;
  StoreId store;
  uint32_t segment;
  uint32_t block;
  uint64_t generation;
  uint32_t slot_blocks;
  uint16_t key_bytes;
  uint16_t buffer_count;
  char key[kMaxKeyBytes];
  Buffer buffers[kMaxBuffers];
  uint8_t zero[3576];
};
static_assert(sizeof(SlotHeader) == kBlockBytes && offsetof(SlotHeader, store) == 32 &&
              offsetof(SlotHeader, generation) == 56 && offsetof(SlotHeader, key) == 72 &&
              offsetof(SlotHeader, buffers) == 136);

struct CheckpointHeader {
  static constexpr uint64_t kMagic = 0x31504B48'4353564B;  // "KVSCHKP1"
  Checksum checksum;
  uint64_t magic;
  uint32_t version;
  uint32_t zero0;
  StoreId store;
  uint64_t sequence;
  uint64_t generation;
  uint64_t entry_bytes;
  uint64_t entries;
  Checksum entry_checksum;
  uint8_t zero[4000];
};
static_assert(sizeof(CheckpointHeader) == kBlockBytes && offsetof(CheckpointHeader, store) == 32 &&
              offsetof(CheckpointHeader, entry_checksum) == 80);

// That of everything behind the block's own.
template <typename Block>
Checksum ChecksumOfRest(const Block& block) {
  return ChecksumOf(std::as_bytes(std::span(&block, 1)).subspan(sizeof(Checksum)));
}

template <typename Block>
void Seal(Block* block) {
  block->magic = Block::kMagic;
  block->version = kVersion;
  block->checksum = ChecksumOfRest(*block);
}

enum class Seen : uint8_t {
  kDamaged,  // or never written
  kForeign,  // whole, but of another version
  kWhole,
};
Seen Look(const Superblock& block);
Seen Look(const SlotHeader& block);
Seen Look(const CheckpointHeader& block);

// The size of each of the two checkpoints' files: entries of 64 bytes (a key of 32, one buffer: 60;
// two, which need three blocks: 68) of the smallest slots, of two blocks, fit.
inline uint64_t CheckpointBytes(uint64_t budget_bytes) {
  return (budget_bytes / 128 / kBlockBytes + 2) * kBlockBytes;
}

// Where a header lies, hence what it must say.
struct Place {
  StoreId store{};
  uint32_t segment = 0;
  uint32_t block = 0;
  uint32_t slot_blocks = 0;
};

// Whether a slot's header is whole, of this place, and of lengths that its slot can hold.
bool HeaderCounts(const SlotHeader& header, const Place& place);

// A header of `state`, sealed. `buffers`: their lengths and checksums.
void WriteHeader(const Place& place, SlotState state, uint64_t generation, std::string_view key,
                 std::span<const SlotHeader::Buffer> buffers, SlotHeader* header);

}  // namespace kvstrata::disk
