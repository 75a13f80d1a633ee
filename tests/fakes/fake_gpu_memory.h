// SPDX-License-Identifier: Apache-2.0
// Memory that the daemon has but must not touch, as a GPU's: `base` is mapped without access, only
// Copy moves bytes, and clients see them kGpuShift away: below, as above it the address space may
// end.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "server/memory/memory_resource.h"

namespace kvstrata::testing {

inline constexpr std::ptrdiff_t kGpuShift = -(std::ptrdiff_t{1} << 38);

class FakeGpuMemory final : public MemoryResource {
 public:
  explicit FakeGpuMemory(std::shared_ptr<std::atomic<bool>> copies_fail,
                         uint64_t granularity = kMemoryGranularity)
      : copies_fail_(std::move(copies_fail)), granularity_(granularity) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, upstream_->Allocate(bytes));
    void* const client = memory.base + kGpuShift;
    KVS_CHECK(mmap(client, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE,
                   memory.fd.get(), 0) == client);
    KVS_CHECK(mprotect(memory.base, bytes, PROT_NONE) == 0);
    std::lock_guard lock(mu_);
    mappings_[memory.base] = bytes;
    return memory;
  }
  void Free(MappedMemory memory) override {
    {
      std::lock_guard lock(mu_);
      mappings_.erase(memory.base);
    }
    munmap(memory.base + kGpuShift, memory.bytes);
    upstream_->Free(std::move(memory));
  }
  Status Copy(std::span<const MemoryCopy> copies) override {
    if (*copies_fail_) return Internal("COPY_FAILED", "injected failure");
    for (const auto& [to, from, shape] : copies) {
      const MemoryCopy near{const_cast<std::byte*>(Reachable(to)), Reachable(from), shape};
      KVS_RETURN_IF_ERROR(upstream_->Copy({&near, 1}));
    }
    return OkStatus();
  }
  MemoryTraits traits() const override { return {"fake gpu", HandleType::kCuda, granularity_}; }

 private:
  // The client's mapping of an address of the GPU; host memory as it is.
  const std::byte* Reachable(const std::byte* at) {
    std::lock_guard lock(mu_);
    const auto after = mappings_.upper_bound(at);
    if (after == mappings_.begin()) return at;
    const auto& [base, bytes] = *std::prev(after);
    return at < base + bytes ? at + kGpuShift : at;
  }

  std::mutex mu_;
  std::map<const std::byte*, uint64_t> mappings_;
  const std::unique_ptr<MemoryResource> upstream_ = NewEmulatedDevice();
  const std::shared_ptr<std::atomic<bool>> copies_fail_;
  const uint64_t granularity_;
};

}  // namespace kvstrata::testing
