#include "server/work/disk_buffers.h"

#include <cstdlib>
#include <utility>

#include "base/check.h"

namespace kvstrata {

uint64_t WholeBlocks(uint64_t bytes) {
  return (bytes + kDiskAlignment - 1) / kDiskAlignment * kDiskAlignment;
}

std::shared_ptr<std::byte> AlignedMemory(uint64_t bytes) {
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kDiskAlignment, bytes));
  KVS_CHECK(data != nullptr);
  return {data, [](std::byte* p) { std::free(p); }};
}

std::string DiskNameOf(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

DiskGet NewDiskGet(std::string key, std::span<const uint64_t> sizes) {
  uint64_t bytes = 0;
  for (const uint64_t size : sizes) bytes += WholeBlocks(size);
  const std::shared_ptr<std::byte> memory = AlignedMemory(bytes);
  DiskGet get{std::move(key), {}, memory, {}};
  uint64_t at = 0;
  for (const uint64_t size : sizes) {
    get.buffers.emplace_back(memory.get() + at, size);
    at += WholeBlocks(size);
  }
  return get;
}

}  // namespace kvstrata
