// SPDX-License-Identifier: Apache-2.0
// ExtentAllocator: which parts of an address range [0, capacity) are taken. Best fit, the lower
// offset on ties; freed extents join their neighbours. Knows no memory: offsets only.
//
// Used for arenas (granularity 4096 bytes) and access counters (granularity 16 counters).
// Thread-safety: none; the store calls under its lock. Errors: freeing what is not taken aborts.
// Cost: O(log free extents) an operation.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace kvstrata {

class ExtentAllocator {
 public:
  // REQUIRES: granularity >= 1 and capacity a multiple of it.
  ExtentAllocator(uint64_t capacity, uint64_t granularity);

  // Sizes are rounded up to this many.
  uint64_t Rounded(uint64_t size) const {
    return (size + granularity_ - 1) / granularity_ * granularity_;
  }

  // REQUIRES: size > 0.
  std::optional<uint64_t> Allocate(uint64_t size);

  // Appends the offsets of up to `n` extents of `size`, as contiguous as can be; returns how many.
  uint32_t AllocateMany(uint64_t size, uint32_t n, std::vector<uint64_t>* offsets);

  // REQUIRES: [offset, offset + size) was allocated, as one extent or as several.
  void Free(uint64_t offset, uint64_t size);

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }
  uint64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  // Free extents: offset and size, ascending, never adjacent.
  const std::map<uint64_t, uint64_t>& free_extents() const { return by_offset_; }

 private:
  // Takes the first `size` of a free extent.
  void Cut(std::set<std::pair<uint64_t, uint64_t>>::iterator extent, uint64_t size);

  const uint64_t capacity_;
  const uint64_t granularity_;
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> by_offset_;           // offset -> size
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (size, offset)
};

}  // namespace kvstrata
