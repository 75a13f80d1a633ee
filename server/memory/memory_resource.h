// MemoryResource: where a pool's arenas come from. A block is one sealed memfd: the daemon maps it
// read-write, the one session that writes it gets `fd`, other sessions get `read_only_fd`.
//
// Implementations: emulated_device.cc (the `device` tier without a GPU), host_pinned.cc (`host`).
// Limits and faults are adaptors around a resource, not flags in it (limiting_resource.cc,
// failing_resource.cc).
// Ownership: a block belongs to whoever allocated it until Free of the same resource.
// Thread-safety: none needed; the store calls under its lock.
// Units: bytes. Cost: a few system calls; memory is touched only when used.
#ifndef KVSTRATA_SERVER_MEMORY_MEMORY_RESOURCE_H_
#define KVSTRATA_SERVER_MEMORY_MEMORY_RESOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

inline constexpr uint64_t kMemoryGranularity = 4096;

struct MemoryBlock {
  std::byte* base = nullptr;  // the daemon's mapping; zeros when new; null: no block
  uint64_t bytes = 0;
  UniqueFd fd;
  UniqueFd read_only_fd;
};

class MemoryResource {
 public:
  virtual ~MemoryResource() = default;

  // A zeroed block. INVALID_ARGUMENT MEMORY_SIZE when `bytes` is 0 or no multiple of
  // kMemoryGranularity; RESOURCE_EXHAUSTED (POOL_EXHAUSTED, MEMORY_EXHAUSTED) when there is none.
  virtual Result<MemoryBlock> Allocate(uint64_t bytes) = 0;

  // Unmaps the block and gives its memory back, even while a client still maps it (it reads zeros).
  virtual void Free(MemoryBlock block) = 0;

  virtual std::string_view name() const = 0;
};

std::unique_ptr<MemoryResource> NewEmulatedDevice();
std::unique_ptr<MemoryResource> NewHostPinned();

// At most `capacity` bytes of `upstream` at a time.
std::unique_ptr<MemoryResource> NewLimitedResource(std::unique_ptr<MemoryResource> upstream,
                                                   uint64_t capacity);

// For tests: the first `successes` allocations pass, all later ones fail with MEMORY_EXHAUSTED.
std::unique_ptr<MemoryResource> NewFailingResource(std::unique_ptr<MemoryResource> upstream,
                                                   uint64_t successes);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_MEMORY_MEMORY_RESOURCE_H_
