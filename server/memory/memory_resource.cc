// SPDX-License-Identifier: Apache-2.0
#include "server/memory/memory_resource.h"

#include <algorithm>

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

constexpr uint64_t kStaged = uint64_t{16} << 20;  // at a time, but for a larger one

uint64_t SpanOf(const CopyShape& shape) {
  return shape.rows == 0 ? 0 : (shape.rows - 1) * shape.pitch + shape.width;
}

}  // namespace

std::unique_ptr<MemoryResource> NewLimitedResource(std::unique_ptr<MemoryResource> upstream,
                                                   const uint64_t* capacity) {
  return std::make_unique<LimitedResource>(std::move(upstream), capacity);
}

// Out of one into memory of the host, from there into the other, by the copies that each knows.
// Right for any two devices; what a link between them could gain is not tried.
Status CopyBetween(MemoryResource& from, MemoryResource& to, std::span<const MemoryCopy> copies) {
  for (size_t begin = 0, end = 0; begin < copies.size(); begin = end) {
    uint64_t bytes = 0;
    while (end < copies.size() && (end == begin || bytes + SpanOf(copies[end].shape) <= kStaged)) {
      bytes += SpanOf(copies[end++].shape);
    }
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::vector<MemoryCopy> out_of, into;
    std::byte* at = staged.get();
    for (const MemoryCopy& copy : copies.subspan(begin, end - begin)) {
      out_of.push_back({at, copy.from, copy.shape});
      into.push_back({copy.to, at, copy.shape});
      at += SpanOf(copy.shape);
    }
    KVS_RETURN_IF_ERROR(from.Copy(out_of));
    KVS_RETURN_IF_ERROR(to.Copy(into));
  }
  return OkStatus();
}

}  // namespace kvstrata
