// The `device` tier of a machine without a GPU: host memory behind the same interface. Pages are
// scattered reads of a few KiB, so huge pages are asked for where the kernel gives them.
#include <sys/mman.h>

#include "server/memory/memory_resource.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

class EmulatedDevice final : public MemoryResource {
 public:
  Result<MemoryBlock> Allocate(uint64_t bytes) override {
    KVS_ASSIGN_OR_RETURN(MemoryBlock block, MapSealedMemfd("kvstrata-device", bytes));
    (void)madvise(block.base, block.bytes, MADV_HUGEPAGE);  // advice: shmem may not have them
    return block;
  }
  void Free(MemoryBlock block) override { UnmapSealedMemfd(std::move(block)); }
  std::string_view name() const override { return "emulated"; }
};

}  // namespace

std::unique_ptr<MemoryResource> NewEmulatedDevice() { return std::make_unique<EmulatedDevice>(); }

}  // namespace kvstrata
