// SPDX-License-Identifier: Apache-2.0
// The slots of a disk tier's files, as docs/disk_format.md has them: for tests that count values or
// damage one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kvstrata::testing {

struct DiskSlot {
  std::string file;
  uint64_t offset = 0;
  uint64_t generation = 0;
  std::string payload;  // its first 8 bytes
};

// Those that hold a value, in the order in which they were written. Reads all files.
inline std::vector<DiskSlot> DiskSlots(const std::string& directory) {
  constexpr uint64_t kBlock = 4096;
  std::vector<DiskSlot> slots;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (!entry.path().filename().string().starts_with("segment.")) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    std::vector<char> block(kBlock);
    for (uint64_t at = 0; file.read(block.data(), kBlock); at += kBlock) {
      uint32_t state = 0;
      uint64_t generation = 0;
      std::memcpy(&state, block.data() + 28, sizeof(state));
      std::memcpy(&generation, block.data() + 56, sizeof(generation));
      const bool slot = std::memcmp(block.data() + 16, "KVSSLOT1", 8) == 0;
      if (!slot || state != 1) continue;
      slots.push_back({entry.path().string(), at, generation, std::string(8, 0)});
      file.read(slots.back().payload.data(), 8);
      file.seekg(static_cast<std::streamoff>(at + kBlock));
    }
  }
  std::sort(slots.begin(), slots.end(),
            [](const DiskSlot& a, const DiskSlot& b) { return a.generation < b.generation; });
  return slots;
}

// Flips a bit of byte `at` of the slot, whose first 4096 are the header.
inline void FlipBit(const DiskSlot& slot, uint64_t at, int bit) {
  std::fstream file(slot.file, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(slot.offset + at));
  const auto byte = static_cast<char>(file.get() ^ (1 << bit));
  file.seekp(static_cast<std::streamoff>(slot.offset + at));
  file.put(byte);
}

// Changes a byte of the value.
inline void FlipByte(const DiskSlot& slot) { FlipBit(slot, 4096 + 5, 0); }

// Overwrites the header: the value is gone.
inline void Remove(const DiskSlot& slot) {
  std::fstream file(slot.file, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(slot.offset));
  const std::string zeros(4096, 0);
  file.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
}

}  // namespace kvstrata::testing
