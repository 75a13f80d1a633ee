// SPDX-License-Identifier: Apache-2.0
// FailingResource: a MemoryResource that fails from the N-th allocation on, or as a lost device
// does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "server/memory/memory_resource.h"

namespace kvstrata {

class FailingResource final : public MemoryResource {
 public:
  FailingResource(std::unique_ptr<MemoryResource> upstream, uint64_t successes,
                  std::shared_ptr<const std::atomic<bool>> lost)
      : upstream_(std::move(upstream)), left_(successes), lost_(std::move(lost)) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    KVS_RETURN_IF_ERROR(CheckLost());
    if (left_ == 0) return ResourceExhausted("MEMORY_EXHAUSTED", "injected failure");
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, upstream_->Allocate(bytes));
    --left_;
    return memory;
  }
  void Free(MappedMemory memory) override { upstream_->Free(std::move(memory)); }
  Status Copy(std::span<const MemoryCopy> copies) override {
    KVS_RETURN_IF_ERROR(CheckLost());
    return upstream_->Copy(copies);
  }
  Status Reach(const std::byte* at) override {
    KVS_RETURN_IF_ERROR(CheckLost());
    return upstream_->Reach(at);
  }
  MemoryTraits traits() const override { return upstream_->traits(); }

 private:
  Status CheckLost() const {
    return *lost_ ? Unavailable("DEVICE_FAILED", "injected failure") : OkStatus();
  }

  const std::unique_ptr<MemoryResource> upstream_;
  uint64_t left_;
  const std::shared_ptr<const std::atomic<bool>> lost_;
};

// The first `successes` allocations pass, all later ones fail with MEMORY_EXHAUSTED.
inline std::unique_ptr<MemoryResource> NewFailingResource(std::unique_ptr<MemoryResource> upstream,
                                                          uint64_t successes) {
  return std::make_unique<FailingResource>(std::move(upstream), successes,
                                           std::make_shared<const std::atomic<bool>>(false));
}

// Once `lost`, allocations and copies answer DEVICE_FAILED, as after a GPU's sticky error.
inline std::unique_ptr<MemoryResource> NewLosableResource(
    std::unique_ptr<MemoryResource> upstream, std::shared_ptr<const std::atomic<bool>> lost) {
  return std::make_unique<FailingResource>(std::move(upstream), ~uint64_t{0}, std::move(lost));
}

}  // namespace kvstrata
