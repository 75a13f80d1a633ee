// SPDX-License-Identifier: Apache-2.0
#include "server/memory/extent_allocator.h"

#include <algorithm>

#include "base/check.h"

namespace kvstrata {

ExtentAllocator::ExtentAllocator(uint64_t capacity, uint64_t granularity)
    : capacity_(capacity), granularity_(granularity) {
  KVS_CHECK(granularity >= 1 && capacity % granularity == 0);
  if (capacity == 0) return;
  by_offset_.emplace(0, capacity);
  by_size_.emplace(capacity, 0);
}

void ExtentAllocator::Cut(std::set<std::pair<uint64_t, uint64_t>>::iterator extent, uint64_t size) {
  const auto [free_size, offset] = *extent;
  by_size_.erase(extent);
  by_offset_.erase(offset);
  if (free_size > size) {
    by_offset_.emplace(offset + size, free_size - size);
    by_size_.emplace(free_size - size, offset + size);
  }
  used_ += size;
}

std::optional<uint64_t> ExtentAllocator::Allocate(uint64_t size) {
  KVS_CHECK(size > 0);
  if (size > capacity_) return std::nullopt;
  size = Rounded(size);
  const auto it = by_size_.lower_bound({size, 0});
  if (it == by_size_.end()) return std::nullopt;
  const uint64_t offset = it->second;
  Cut(it, size);
  return offset;
}

uint32_t ExtentAllocator::AllocateMany(uint64_t size, uint32_t n, std::vector<uint64_t>* offsets) {
  KVS_CHECK(size > 0);
  if (size > capacity_) return 0;
  size = Rounded(size);
  uint32_t done = 0;
  while (done < n) {
    const uint64_t fit = largest_free() / size;
    if (fit == 0) break;
    const uint64_t k = std::min<uint64_t>(n - done, fit);
    const auto it = by_size_.lower_bound({k * size, 0});
    const uint64_t first = it->second;
    Cut(it, k * size);
    for (uint64_t i = 0; i < k; ++i) offsets->push_back(first + i * size);
    done += static_cast<uint32_t>(k);
  }
  return done;
}

void ExtentAllocator::Free(uint64_t offset, uint64_t size) {
  KVS_CHECK(size > 0 && offset % granularity_ == 0);
  size = Rounded(size);
  KVS_CHECK(offset <= capacity_ && size <= capacity_ - offset && size <= used_);
  used_ -= size;
  auto next = by_offset_.lower_bound(offset);
  KVS_CHECK(next == by_offset_.end() || offset + size <= next->first);
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    KVS_CHECK(previous->first + previous->second <= offset);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      by_size_.erase({previous->second, previous->first});
      by_offset_.erase(previous);
    }
  }
  if (next != by_offset_.end() && offset + size == next->first) {
    size += next->second;
    by_size_.erase({next->second, next->first});
    by_offset_.erase(next);
  }
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
}

}  // namespace kvstrata
