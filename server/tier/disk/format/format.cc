// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/format/format.h"

#include <cstring>

#include "server/tier/guard.h"

namespace kvstrata::disk {
namespace {

template <typename Block>
Seen LookAt(const Block& block, Guard guard) {
  if (block.magic != Block::kMagic) return Seen::kDamaged;
  if (ChecksumOfRest(block) != block.checksum && Holds(guard)) return Seen::kDamaged;
  return block.version == kVersion ? Seen::kWhole : Seen::kForeign;
}

bool Fits(const SlotHeader& header) {
  if (header.buffer_count > kMaxBuffers || header.key_bytes > kMaxKeyBytes) return false;
  uint64_t left = header.slot_blocks - 1;
  for (uint32_t i = 0; i < header.buffer_count; ++i) {
    if (header.buffers[i].bytes > left * kBlockBytes) return false;
    left -= BlocksOf(header.buffers[i].bytes);
  }
  return true;
}

}  // namespace

uint64_t ClassOf(uint64_t blocks) {
  if (blocks <= 32) return blocks;
  const uint64_t below = std::bit_floor(blocks) / 16 - 1;  // the step, a power of two, less one
  return (blocks + below) & ~below;
}

uint64_t PayloadBlocks(std::span<const uint64_t> sizes) {
  uint64_t blocks = 0;
  for (const uint64_t bytes : sizes) blocks += BlocksOf(bytes);
  return blocks;
}

uint32_t SlotBlocks(std::span<const uint64_t> sizes) {
  return static_cast<uint32_t>(1 + ClassOf(PayloadBlocks(sizes)));
}

Seen Look(const Superblock& block) { return LookAt(block, Guard::kSuperblockChecksum); }
Seen Look(const SlotHeader& block) { return LookAt(block, Guard::kHeaderChecksum); }
Seen Look(const CheckpointHeader& block) { return LookAt(block, Guard::kCheckpointChecksum); }

bool HeaderCounts(const SlotHeader& header, const Place& place) {
  if (Look(header) != Seen::kWhole || header.slot_blocks != place.slot_blocks) return false;
  const bool here =
      header.store == place.store && header.segment == place.segment && header.block == place.block;
  return (here || !Holds(Guard::kPlace)) && Fits(header);
}

void WriteHeader(const Place& place, SlotState state, uint64_t generation, std::string_view key,
                 std::span<const SlotHeader::Buffer> buffers, SlotHeader* header) {
  *header = {};
  header->state = state;
  header->store = place.store;
  header->segment = place.segment;
  header->block = place.block;
  header->generation = generation;
  header->slot_blocks = place.slot_blocks;
  header->key_bytes = static_cast<uint16_t>(key.size());
  header->buffer_count = static_cast<uint16_t>(buffers.size());
  std::memcpy(header->key, key.data(), key.size());
  std::copy(buffers.begin(), buffers.end(), header->buffers);
  Seal(header);
}

}  // namespace kvstrata::disk
