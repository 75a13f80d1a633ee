// SPDX-License-Identifier: Apache-2.0
// The `device` tier of a machine without a GPU: host memory behind the same interface. Pages are
// scattered reads of a few KiB, so huge pages are asked for where the kernel gives them.
#include <sys/mman.h>

#include "server/memory/memory_resource.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

class EmulatedDevice final : public MemoryResource {
 public:
  Result<MappedMemory> Allocate(uint64_t bytes) override {
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, MapSealedMemfd("kvstrata-device", bytes));
    (void)madvise(memory.base, memory.bytes, MADV_HUGEPAGE);  // advice: shmem may not have them
    return memory;
  }
  void Free(MappedMemory memory) override { UnmapSealedMemfd(std::move(memory)); }
  MemoryTraits traits() const override { return {"emulated"}; }
};

}  // namespace

std::unique_ptr<MemoryResource> NewEmulatedDevice() { return std::make_unique<EmulatedDevice>(); }

}  // namespace kvstrata
