// SPDX-License-Identifier: Apache-2.0
// An engine's tensors in memory of a GPU, read by the copy engine.
#include <cstdlib>
#include <string>
#include <vector>

#include "server/memory/tensor_memory.h"

namespace kvstrata {
namespace {

class CudaTensor final : public TensorMemory {
 public:
  CudaTensor(const TensorDevice& device, bool ipc, const cuda::DeviceArena& memory)
      : device_(device), ipc_(ipc), memory_(memory) {}
  ~CudaTensor() override {
    // An error is of work long past, or the GPU is lost: either way nothing is mapped afterwards.
    if (ipc_) {
      (void)device_.ops->close_ipc(device_.device, &memory_);
    } else {
      (void)device_.ops->release_arena(device_.device, &memory_);
    }
  }

  Status Read(std::span<const Piece> pieces, std::byte* to) override {
    std::vector<cuda::PageCopy> copies;
    copies.reserve(pieces.size());
    for (const Piece& piece : pieces) {
      const auto* from = reinterpret_cast<const std::byte*>(memory_.address) + piece.offset;
      copies.push_back({to, from, {piece.bytes, piece.bytes, 1}});
      to += piece.bytes;
    }
    const int error = device_.ops->copy_pages(device_.device, copies.data(), copies.size());
    if (error == 0) return OkStatus();
    return Internal("TENSOR_READ", std::string("copying from the engine's tensors: ") +
                                       device_.ops->error_text(error) +
                                       "; look at dmesg and nvidia-smi");
  }

 private:
  const TensorDevice device_;
  const bool ipc_;
  cuda::DeviceArena memory_;
};

}  // namespace

Result<std::byte*> HostBuffer::Reserve(uint64_t bytes) {
  if (bytes > bytes_) {
    Free();
    const bool made = ops_ != nullptr ? ops_->allocate_page_locked(bytes, &at_) == 0
                                      : (at_ = std::malloc(bytes)) != nullptr;
    if (!made) {
      at_ = nullptr;
      return ResourceExhausted("MEMORY_EXHAUSTED",
                               std::to_string(bytes) + " bytes of the host could not be had");
    }
    bytes_ = bytes;
  }
  return static_cast<std::byte*>(at_);
}

void HostBuffer::Free() {
  if (ops_ != nullptr && at_ != nullptr) (void)ops_->free_page_locked(at_);
  if (ops_ == nullptr) std::free(at_);
  at_ = nullptr;
  bytes_ = 0;
}

Result<std::unique_ptr<TensorMemory>> OpenCudaTensor(const TensorHandle& handle,
                                                     const TensorDevice& device) {
  const bool ipc = handle.kind == TensorKind::kCudaIpc;
  cuda::DeviceArena memory;
  const int error =
      ipc ? device.ops->open_ipc(device.device, handle.ipc.data(), &memory)
          : device.ops->import_arena(device.device, handle.fd, handle.bytes, false, &memory);
  if (error != 0) {
    return InvalidArgument(
        "TENSOR_HANDLE",
        std::string(ipc ? "the cudaIpc handle" : "fd, as memory of the GPU of this daemon,") +
            " cannot be opened: " + device.ops->error_text(error) +
            (ipc ? "; it must be of cudaMalloc's memory, of another process and the same GPU"
                 : "; it must be a POSIX descriptor of cuMemCreate's memory, and bytes its size"));
  }
  auto tensor = std::make_unique<CudaTensor>(device, ipc, memory);
  if (handle.bytes > memory.bytes) {
    return InvalidArgument("TENSOR_HANDLE", "bytes is " + std::to_string(handle.bytes) +
                                                "; the memory has " + std::to_string(memory.bytes));
  }
  return std::unique_ptr<TensorMemory>(std::move(tensor));
}

}  // namespace kvstrata
