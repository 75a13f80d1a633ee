// SPDX-License-Identifier: Apache-2.0
// MemoryResource: where a pool's arenas come from. A mapping is one sealed memfd, or memory of a
// GPU: the daemon maps it read-write, the one session that writes it gets `fd`, other sessions get
// `read_only_fd`.
//
// Implementations: emulated_device.cc (the `device` tier without a GPU), cuda_device.cc (with one),
// host_memory.cc (`host`).
// Limits and faults are adaptors around a resource, not flags in it.
// Ownership: a mapping belongs to whoever allocated it until Free of the same resource.
// Thread-safety: none needed, the store calls under its lock; but Copy from any thread.
// Units: bytes. Cost: a few system calls; memory is touched only when used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

inline constexpr uint64_t kMemoryGranularity = 4096;

// What the descriptors of a mapping are, hence how they are mapped; shm::Arena::memory.
enum class HandleType : uint16_t {
  kMemfd = 0,
  kCuda = 1,  // `base` is an address of the GPU: only Copy may follow it. Both descriptors are the
              // driver's, and whoever maps one chooses how (kernels/cuda/device_memory.h).
};

// `rows` pieces of `width` bytes, each `pitch` bytes behind the one before, at both ends.
struct CopyShape {
  uint64_t width = 0, pitch = 0, rows = 1;
};

struct MemoryCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  CopyShape shape;
};

struct MappedMemory {
  std::byte* base = nullptr;  // the daemon's mapping; zeros when new; null: none
  uint64_t bytes = 0;
  UniqueFd fd;
  UniqueFd read_only_fd;
};

// What is the same for all memory of a resource.
struct MemoryTraits {
  std::string_view name;
  HandleType handle_type = HandleType::kMemfd;
  uint64_t granularity = kMemoryGranularity;  // a multiple of that
};

class MemoryResource {
 public:
  virtual ~MemoryResource() = default;

  virtual MemoryTraits traits() const = 0;
  std::string_view name() const { return traits().name; }
  HandleType handle_type() const { return traits().handle_type; }
  uint64_t granularity() const { return traits().granularity; }

  // A zeroed mapping. INVALID_ARGUMENT MEMORY_SIZE when `bytes` is 0 or no multiple of
  // granularity(); RESOURCE_EXHAUSTED (POOL_EXHAUSTED, MEMORY_EXHAUSTED) when there is none;
  // UNAVAILABLE DEVICE_FAILED: the device is lost to this process, all later calls answer the same.
  virtual Result<MappedMemory> Allocate(uint64_t bytes) = 0;

  // Unmaps it and releases its memory: a memfd's at once, even while a client still maps
  // it (it reads zeros), a GPU's when the last client has unmapped it.
  virtual void Free(MappedMemory memory) = 0;

  // Each between a mapping of this resource and one of any resource of the daemon, or other memory
  // of its own; done when it returns. Many at once are faster than one after the other. INTERNAL
  // COPY_FAILED; UNAVAILABLE DEVICE_FAILED as above.
  virtual Status Copy(std::span<const MemoryCopy> copies) {
    for (const auto& [to, from, shape] : copies) {
      for (uint64_t i = 0; i < shape.rows; ++i) {
        std::memcpy(to + i * shape.pitch, from + i * shape.pitch, shape.width);
      }
    }
    return OkStatus();
  }

  // Lets kernels of this resource's device follow addresses of the mapping of any resource of the
  // daemon that holds `at`; done when it returns, until the mapping is freed. Any thread. Host
  // memory takes 0.6 s a GiB, once. RESOURCE_EXHAUSTED HOST_UNREACHABLE.
  virtual Status Reach(const std::byte* /*at*/) { return OkStatus(); }
};

// Copies from mappings of one device into another's, through memory of the host; done when it
// returns. Errors as Copy; an empty Copy of each says whose DEVICE_FAILED is.
Status CopyBetween(MemoryResource& from, MemoryResource& to, std::span<const MemoryCopy> copies);

std::unique_ptr<MemoryResource> NewEmulatedDevice();
std::unique_ptr<MemoryResource> NewHostMemory();

// Memory of the GPUs named, in this order; without a name: of all that this process sees.
// UNAVAILABLE CUDA_LIBRARY or CUDA_NO_DEVICE; NOT_FOUND DEVICE_UNKNOWN names those that there are.
struct CudaDevice {
  std::unique_ptr<MemoryResource> memory;
  std::string uuid;
  uint64_t free_bytes = 0;  // when it was found
  int ordinal = 0;          // in this process
};
struct CudaDevices {
  std::vector<CudaDevice> devices;
  std::unique_ptr<MemoryResource> host;  // that their copy engines reach at full speed
};
Result<CudaDevices> NewCudaDevices(std::span<const std::string> uuids);

// Gives out no mapping that would make it more than `*capacity` bytes of `upstream`; the caller may
// change that, and keeps it.
std::unique_ptr<MemoryResource> NewLimitedResource(std::unique_ptr<MemoryResource> upstream,
                                                   const uint64_t* capacity);

}  // namespace kvstrata
