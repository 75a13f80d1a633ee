// SPDX-License-Identifier: Apache-2.0
// The `host` tier: memfds, not page-locked. Where there is a GPU, cuda_device.cc registers them
// with it.
#include "server/memory/memory_resource.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

class HostMemory final : public MemoryResource {
 public:
  Result<MappedMemory> Allocate(uint64_t bytes) override {
    return MapSealedMemfd("kvstrata-host", bytes);
  }
  void Free(MappedMemory memory) override { UnmapSealedMemfd(std::move(memory)); }
  MemoryTraits traits() const override { return {"host"}; }
};

}  // namespace

std::unique_ptr<MemoryResource> NewHostMemory() { return std::make_unique<HostMemory>(); }

}  // namespace kvstrata
