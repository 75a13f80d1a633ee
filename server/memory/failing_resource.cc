// Fault injection for tests: fails from the N-th allocation on.
#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

class FailingResource final : public MemoryResource {
 public:
  FailingResource(std::unique_ptr<MemoryResource> upstream, uint64_t successes)
      : upstream_(std::move(upstream)), left_(successes) {}

  Result<MemoryBlock> Allocate(uint64_t bytes) override {
    if (left_ == 0) return ResourceExhausted("MEMORY_EXHAUSTED", "injected failure");
    KVS_ASSIGN_OR_RETURN(MemoryBlock block, upstream_->Allocate(bytes));
    --left_;
    return block;
  }
  void Free(MemoryBlock block) override { upstream_->Free(std::move(block)); }
  Status Copy(std::byte* to, const std::byte* from, const CopyShape& shape) override {
    return upstream_->Copy(to, from, shape);
  }
  uint64_t granularity() const override { return upstream_->granularity(); }
  Memory memory() const override { return upstream_->memory(); }
  std::string_view name() const override { return upstream_->name(); }

 private:
  const std::unique_ptr<MemoryResource> upstream_;
  uint64_t left_;
};

}  // namespace

std::unique_ptr<MemoryResource> NewFailingResource(std::unique_ptr<MemoryResource> upstream,
                                                   uint64_t successes) {
  return std::make_unique<FailingResource>(std::move(upstream), successes);
}

}  // namespace kvstrata
