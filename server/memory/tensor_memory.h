// SPDX-License-Identifier: Apache-2.0
// TensorMemory: memory in which an engine keeps its keys and values, opened by the daemon and only
// ever read: what imported sequences are copied from.
//
// Implementations: memfd_tensor.cc, cuda_tensor.cc (memory of a GPU, by a descriptor of the
// driver's virtual memory management or by a cudaIpc handle). Nothing of a memfd is mapped: what
// the engine does to it, or its death, makes a read fail and never faults, and holes cost the
// daemon no memory. Ownership: an open TensorMemory keeps the memory alive after its engine has
// gone. Thread-safety: Read from any thread. Destroying memory of a GPU may wait for the driver
// without end when the engine is dead: never on a thread that others wait for (TensorReleases).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/unique_fd.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

enum class TensorKind : uint32_t { kMemfd = 1, kCudaFd = 2, kCudaIpc = 3 };

// What a client sent. Nothing of it is true before it was opened.
struct TensorHandle {
  TensorKind kind = TensorKind::kMemfd;
  int fd = -1;  // kMemfd, kCudaFd; the caller's
  std::array<uint8_t, 64> ipc{};
  uint64_t bytes = 0;  // size of the whole memory
};

class TensorMemory {
 public:
  struct Piece {
    uint64_t offset = 0, bytes = 0;
  };
  virtual ~TensorMemory() = default;

  // Copies the pieces, one behind the other, to memory of the host; done when it returns.
  // REQUIRES: they lie inside the `bytes` that it was opened with. INTERNAL TENSOR_READ.
  virtual Status Read(std::span<const Piece> pieces, std::byte* to) = 0;
};

// The GPU on which handles of its memory are opened; ops null: there is none.
struct TensorDevice {
  const cuda::CudaOps* ops = nullptr;
  int device = 0;  // ordinal in this process
};

// Memory of the host that Read fills; where there is a GPU its copy engine reaches it at full
// speed.
class HostBuffer {
 public:
  explicit HostBuffer(const cuda::CudaOps* ops) : ops_(ops) {}
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer() { Free(); }

  // Reserves at least that many bytes; what they held before is lost. RESOURCE_EXHAUSTED
  // MEMORY_EXHAUSTED.
  Result<std::byte*> Reserve(uint64_t bytes);

 private:
  void Free();
  const cuda::CudaOps* const ops_;  // null: ordinary memory
  void* at_ = nullptr;
  uint64_t bytes_ = 0;
};

// INVALID_ARGUMENT TENSOR_HANDLE: no memory of that kind, not sealed against shrinking (a memfd),
// or smaller than `bytes`. UNIMPLEMENTED TENSOR_KIND: a GPU's, and this daemon has none.
Result<std::unique_ptr<TensorMemory>> OpenTensor(const TensorHandle& handle,
                                                 const TensorDevice& device);

// One each of the two files.
Result<std::unique_ptr<TensorMemory>> OpenMemfdTensor(const TensorHandle& handle);
Result<std::unique_ptr<TensorMemory>> OpenCudaTensor(const TensorHandle& handle,
                                                     const TensorDevice& device);

}  // namespace kvstrata
