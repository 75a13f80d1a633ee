// SPDX-License-Identifier: Apache-2.0
#include "server/tier/tier_buffers.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/sync.h"
#include "server/memory/extent_allocator.h"

namespace kvstrata {

uint64_t WholeBlocks(uint64_t bytes) {
  return (bytes + kValueAlignment - 1) / kValueAlignment * kValueAlignment;
}

namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

struct Freed {
  void operator()(std::byte* p) const { std::free(p); }
};
using Block = std::unique_ptr<std::byte, Freed>;

Block AlignedBlock(uint64_t alignment, uint64_t bytes) {
  Block block(static_cast<std::byte*>(std::aligned_alloc(alignment, bytes)));
  KVS_CHECK(block != nullptr);
  return block;
}

}  // namespace

std::shared_ptr<std::byte> HeapBuffers(uint64_t bytes) {
  const std::shared_ptr<std::byte> block = AlignedBlock(kValueAlignment, kValueAlignment + bytes);
  return {block, block.get() + kValueAlignment};
}

struct TierBuffers::Memory {
  explicit Memory(uint64_t bytes_)
      : base(AlignedBlock(kHugePage, (bytes_ + kHugePage - 1) / kHugePage * kHugePage)),
        bytes(bytes_),
        extents(bytes_, kValueAlignment) {
    (void)madvise(base.get(), bytes, MADV_HUGEPAGE);  // advice
  }

  const Block base;
  const uint64_t bytes;
  std::atomic<size_t> in_use = 0;
  Mutex mu;
  ExtentAllocator extents KVS_GUARDED_BY(mu);
};

TierBuffers::TierBuffers(uint64_t bytes) : memory_(std::make_shared<Memory>(bytes)) {}

std::shared_ptr<std::byte> TierBuffers::Take(uint64_t bytes) {
  const uint64_t all = kValueAlignment + bytes;
  std::optional<uint64_t> at;
  {
    MutexLock lock(memory_->mu);
    at = memory_->extents.Allocate(all);
  }
  ++memory_->in_use;
  if (!at) {
    std::shared_ptr<std::byte> heap = HeapBuffers(bytes);
    std::byte* const buffer = heap.get();
    return {buffer, [memory = memory_, heap = std::move(heap)](std::byte*) mutable {
              heap.reset();
              --memory->in_use;
            }};
  }
  return {memory_->base.get() + *at + kValueAlignment,
          [memory = memory_, at = *at, all](std::byte*) {
            MutexLock lock(memory->mu);
            memory->extents.Free(at, all);
            --memory->in_use;
          }};
}

std::shared_ptr<std::byte> TierBuffers::memory() const { return {memory_, memory_->base.get()}; }
uint64_t TierBuffers::bytes() const { return memory_->bytes; }
size_t TierBuffers::in_use() const { return memory_->in_use; }

TierGet NewTierGet(std::string key, std::span<const uint64_t> sizes, TierBuffers* buffers) {
  uint64_t bytes = 0;
  for (const uint64_t size : sizes) bytes += WholeBlocks(size);
  const std::shared_ptr<std::byte> memory =
      buffers == nullptr ? HeapBuffers(bytes) : buffers->Take(bytes);
  TierGet get{std::move(key), {}, memory, {}, true};
  uint64_t at = 0;
  for (const uint64_t size : sizes) {
    get.buffers.emplace_back(memory.get() + at, size);
    at += WholeBlocks(size);
  }
  return get;
}

}  // namespace kvstrata
