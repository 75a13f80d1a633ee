// SPDX-License-Identifier: Apache-2.0
// PageMap: the arenas that the daemon passed to this session, mapped when first used, and the way
// from a table's entry to an address. With a GPU, arenas of its memory have addresses there, and
// those of the host's are registered, so that one address serves both.
//
// Ownership: owns descriptors until they are mapped, then the mappings, until destruction.
// Threads: all methods from any thread; one short lock.
// Trust: sizes and seals are verified before mapping, entries are bounds-checked: a wrong table is
// an error, never a fault. Mappings are not inherited by fork() nor dumped in a core.
// Cost: Resolve is a hash look-up; the first use of an arena is one mmap (no memory is touched),
// with a GPU 0.2 ms (an arena there) or 45 ms a GiB (registration).
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "kernels/cuda/cuda_ops.h"
#include "proto/attach_messages.h"
#include "proto/shm_layout.h"

namespace kvstrata::client {

// One shared mapping of a sealed memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // Maps all `bytes` of `fd`. DATA_LOSS SEGMENT_INVALID, naming `what`, when the file has another
  // size or could still shrink under us (a fault later).
  static Result<Mapping> Of(int fd, uint64_t bytes, bool writable, std::string_view what);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Forgets the mapping: in a child of fork() it does not exist, and the range may be another's.
  void Abandon();

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// The GPU that a session's steps run on. ops null: none, they run on the CPU.
struct Gpu {
  const cuda::CudaOps* ops = nullptr;
  int device = -1;  // ordinal in this process
};

// The GPU of this UUID. UNAVAILABLE CUDA_LIBRARY, CUDA_NO_DEVICE; NOT_FOUND DEVICE_UNKNOWN.
Result<Gpu> FindGpu(std::string_view uuid);

class PageMap {
 public:
  ~PageMap() { Clear(); }

  // Called before the first Resolve.
  void Use(const Gpu& gpu);

  void Add(const shm::Arena& arena, UniqueFd fd);

  // The address of `bytes` bytes at `entry`. NOT_FOUND ARENA_UNKNOWN when its arena has not arrived
  // (read the attach socket and try again), DATA_LOSS TABLE_INVALID when it breaks bounds.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes);

  // Whether this session may write the entry's bytes without asking for a private copy.
  bool Writable(const shm::PageEntry& entry);

  // Unmaps all, before the daemon is told that this was done. Waits for the GPU's work on it.
  void Clear();
  // As Mapping::Abandon, for all.
  void AbandonAfterFork() KVS_NO_THREAD_SAFETY_ANALYSIS;

 private:
  struct Arena {
    UniqueFd fd;  // until mapped
    uint64_t bytes = 0;
    bool writable = false;
    bool on_gpu = false;
    Mapping mapping;           // where host memory is mapped
    cuda::DeviceArena device;  // the GPU's memory
    std::byte* base() const {
      return on_gpu ? reinterpret_cast<std::byte*>(device.address) : mapping.data();
    }
  };
  Status Map(Arena* arena) KVS_REQUIRES(mu_);

  Mutex mu_;
  Gpu gpu_ KVS_GUARDED_BY(mu_);
  std::unordered_map<uint32_t, Arena> arenas_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata::client
