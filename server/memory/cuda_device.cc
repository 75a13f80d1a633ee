// The `device` tier of a machine with a GPU: arenas of its memory, by the driver's virtual memory
// management. All of CUDA is behind the table (kernels/cuda/cuda_library.h).
#include <fcntl.h>

#include <string>

#include "kernels/cuda/cuda_library.h"
#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

class CudaMemory final : public MemoryResource {
 public:
  CudaMemory(const cuda::CudaOps& ops, int device, uint64_t granularity)
      : ops_(ops), device_(device), granularity_(granularity) {}

  Result<MemoryBlock> Allocate(uint64_t bytes) override {
    if (bytes == 0 || bytes % granularity_ != 0) {
      return InvalidArgument("MEMORY_SIZE", "bytes is " + std::to_string(bytes) +
                                                "; allowed on this GPU: positive multiples of " +
                                                std::to_string(granularity_));
    }
    MemoryBlock block;
    cuda::DeviceArena arena;
    int fd = -1;
    if (const int error = ops_.create_arena(device_, bytes, &arena, &fd); error != 0) {
      return ResourceExhausted("MEMORY_EXHAUSTED",
                               std::to_string(bytes) +
                                   " bytes of the GPU could not be had: " + ops_.error_text(error) +
                                   "; lower pool.device_bytes, or free the GPU");
    }
    block.fd.Reset(fd);
    block.read_only_fd.Reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    block.base = AddressOf(arena.address);
    block.bytes = bytes;
    if (block.read_only_fd) return block;
    Free(std::move(block));
    return ResourceExhausted("MEMORY_EXHAUSTED",
                             "no descriptor is left for an arena; raise RLIMIT_NOFILE");
  }

  void Free(MemoryBlock block) override {
    if (block.base == nullptr) return;
    cuda::DeviceArena arena{reinterpret_cast<uint64_t>(block.base), block.bytes};
    // An error is of work long past, or the GPU is lost: either way nothing is mapped afterwards.
    (void)ops_.release_arena(device_, &arena);
  }

  Status Copy(std::byte* to, const std::byte* from, const CopyShape& shape) override {
    const int error = ops_.copy_2d(device_, to, from, {shape.width, shape.pitch, shape.rows});
    if (error == 0) return OkStatus();
    return Internal("COPY_FAILED", std::string("copying pages of the GPU: ") +
                                       ops_.error_text(error) + "; look at dmesg and nvidia-smi");
  }

  uint64_t granularity() const override { return granularity_; }
  Memory memory() const override { return Memory::kCuda; }
  std::string_view name() const override { return "cuda"; }

 private:
  static std::byte* AddressOf(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

  const cuda::CudaOps& ops_;
  const int device_;
  const uint64_t granularity_;
};

}  // namespace

Result<CudaDevice> NewCudaDevice(std::string_view uuid) {
  KVS_ASSIGN_OR_RETURN(const cuda::CudaOps* const ops, cuda::LoadCudaOps());
  std::string found;
  for (int device = 0; device < ops->device_count(); ++device) {
    cuda::DeviceInfo info;
    if (const int error = ops->describe_device(device, &info); error != 0) {
      return Unavailable("CUDA_NO_DEVICE", "GPU " + std::to_string(device) + " does not answer: " +
                                               ops->error_text(error) + "; look at nvidia-smi");
    }
    if (uuid.empty() || uuid == info.uuid) {
      return CudaDevice{std::make_unique<CudaMemory>(*ops, device, info.arena_granularity),
                        info.uuid, info.free_bytes, device};
    }
    found += (found.empty() ? "" : ", ") + std::string(info.uuid);
  }
  return NotFound("DEVICE_UNKNOWN",
                  "no GPU is '" + std::string(uuid) + "'; this process sees " + found);
}

}  // namespace kvstrata
