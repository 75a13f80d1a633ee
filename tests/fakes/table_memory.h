// SPDX-License-Identifier: Apache-2.0
// A TableMemory without memory: one arena, of which nothing is read or written.
#pragma once

#include <cstdint>
#include <functional>

#include "session/sequence_tables.h"

namespace kvstrata::test {

// Arena 1; entries without flags are writable. A Grow does what the test says.
class FakeMemory final : public TableMemory {
 public:
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) override {
    if (entry.arena != 1) return NotFound("ARENA_UNKNOWN", "on purpose");
    asked_bytes = bytes;
    ++resolved;
    return base + entry.offset;
  }
  bool Writable(const shm::PageEntry& entry) override { return entry.flags == 0; }
  Status Grow(const TableClaim& claim) override {
    ++grown;
    return grow(claim);
  }
  bool on_gpu() const override { return gpu; }
  Status Read(std::byte*, const std::byte*, uint64_t) override { return OkStatus(); }

  std::function<Status(const TableClaim&)> grow = [](const TableClaim&) { return OkStatus(); };
  std::byte* const base = reinterpret_cast<std::byte*>(uintptr_t{1} << 20);
  uint64_t asked_bytes = 0;
  int resolved = 0, grown = 0;
  bool gpu = false;
};

}  // namespace kvstrata::test
