// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

class LimitedResource final : public MemoryResource {
 public:
  LimitedResource(std::unique_ptr<MemoryResource> upstream, const uint64_t* capacity)
      : upstream_(std::move(upstream)), capacity_(capacity) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    const uint64_t left = *capacity_ - std::min(used_, *capacity_);
    if (bytes > left) {
      return ResourceExhausted("POOL_EXHAUSTED", "pool '" + std::string(name()) + "' has " +
                                                     std::to_string(left) + " of " +
                                                     std::to_string(*capacity_) + " bytes left, " +
                                                     std::to_string(bytes) + " are needed");
    }
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, upstream_->Allocate(bytes));
    used_ += memory.bytes;
    return memory;
  }
  void Free(MappedMemory memory) override {
    KVS_CHECK(memory.bytes <= used_);
    used_ -= memory.bytes;
    upstream_->Free(std::move(memory));
  }
  Status Copy(std::span<const MemoryCopy> copies) override { return upstream_->Copy(copies); }
  Status Reach(const std::byte* at) override { return upstream_->Reach(at); }
  MemoryTraits traits() const override { return upstream_->traits(); }

 private:
  const std::unique_ptr<MemoryResource> upstream_;
  const uint64_t* const capacity_;
  uint64_t used_ = 0;
};

}  // namespace

std::unique_ptr<MemoryResource> NewLimitedResource(std::unique_ptr<MemoryResource> upstream,
                                                   const uint64_t* capacity) {
  return std::make_unique<LimitedResource>(std::move(upstream), capacity);
}

}  // namespace kvstrata
