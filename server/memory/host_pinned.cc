// The `host` tier. Without a GPU nothing reads it by DMA and nothing has to be pinned: pinning (by
// registration with the device) arrives with the first backend that copies.
#include "server/memory/memory_resource.h"
#include "server/memory/sealed_memfd.h"

namespace kvstrata {
namespace {

class HostPinned final : public MemoryResource {
 public:
  Result<MemoryBlock> Allocate(uint64_t bytes) override {
    return MapSealedMemfd("kvstrata-host", bytes);
  }
  void Free(MemoryBlock block) override { UnmapSealedMemfd(std::move(block)); }
  std::string_view name() const override { return "host"; }
};

}  // namespace

std::unique_ptr<MemoryResource> NewHostPinned() { return std::make_unique<HostPinned>(); }

}  // namespace kvstrata
