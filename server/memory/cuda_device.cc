// SPDX-License-Identifier: Apache-2.0
// The `device` tier of a machine with GPUs: arenas of their memory, by the driver's virtual memory
// management; and host memory that its copy engine reaches. All of CUDA is behind the table
// (kernels/cuda/cuda_library.h).
#include <fcntl.h>

#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_library.h"
#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

// Mappings of host memory. One is registered when a copy first meets it, not when it is made: that
// touches all of it, 0.6 s a GiB, and the store makes mappings under its lock.
class RegisteredHost {
 public:
  explicit RegisteredHost(const cuda::CudaOps& ops) : ops_(ops) {}

  void Add(std::byte* base, uint64_t bytes) {
    std::lock_guard lock(mu_);
    mappings_[base] = std::make_shared<Registered>(bytes);
  }
  void Remove(std::byte* base) {
    std::shared_ptr<Registered> memory;
    {
      std::lock_guard lock(mu_);
      const auto it = mappings_.find(base);
      memory = std::move(it->second);
      mappings_.erase(it);
    }
    if (memory->error == 0) (void)ops_.unregister_host(base);
  }
  // 0, or why the mapping cannot be had: a copy is slower then, and as right. Does nothing for
  // another kind of memory.
  int Reach(const std::byte* at) {
    std::byte* base = nullptr;
    std::shared_ptr<Registered> memory;
    {
      std::lock_guard lock(mu_);
      const auto after = mappings_.upper_bound(at);
      if (after == mappings_.begin()) return 0;
      std::tie(base, memory) = *std::prev(after);
    }
    if (at >= base + memory->bytes) return 0;
    std::call_once(memory->once,
                   [&] { memory->error = ops_.register_host(base, memory->bytes, false); });
    return memory->error;
  }

 private:
  static constexpr int kNotTried = -1;
  struct Registered {
    explicit Registered(uint64_t n) : bytes(n) {}
    const uint64_t bytes;
    std::once_flag once;
    int error = kNotTried;  // why registering failed; 0: it did not
  };

  const cuda::CudaOps& ops_;
  std::mutex mu_;
  std::map<std::byte*, std::shared_ptr<Registered>, std::less<>> mappings_;
};

class CudaHost final : public MemoryResource {
 public:
  explicit CudaHost(std::shared_ptr<RegisteredHost> mappings) : mappings_(std::move(mappings)) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, upstream_->Allocate(bytes));
    mappings_->Add(memory.base, memory.bytes);
    return memory;
  }
  void Free(MappedMemory memory) override {
    if (memory.base != nullptr) mappings_->Remove(memory.base);
    upstream_->Free(std::move(memory));
  }
  MemoryTraits traits() const override { return upstream_->traits(); }

 private:
  const std::shared_ptr<RegisteredHost> mappings_;
  const std::unique_ptr<MemoryResource> upstream_ = NewHostMemory();
};

class CudaMemory final : public MemoryResource {
 public:
  CudaMemory(const cuda::CudaOps& ops, int device, uint64_t granularity,
             std::shared_ptr<RegisteredHost> host)
      : ops_(ops), device_(device), granularity_(granularity), host_(std::move(host)) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    if (bytes == 0 || bytes % granularity_ != 0) {
      return InvalidArgument("MEMORY_SIZE", "bytes is " + std::to_string(bytes) +
                                                "; allowed on this GPU: positive multiples of " +
                                                std::to_string(granularity_));
    }
    MappedMemory memory;
    cuda::DeviceArena arena;
    int fd = -1;
    if (const int error = ops_.create_arena(device_, bytes, &arena, &fd); error != 0) {
      if (ops_.is_sticky(error)) return Lost(error);
      return ResourceExhausted("MEMORY_EXHAUSTED",
                               std::to_string(bytes) +
                                   " bytes of the GPU could not be had: " + ops_.error_text(error) +
                                   "; lower pool.device_bytes, or free the GPU");
    }
    memory.fd.Reset(fd);
    memory.read_only_fd.Reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    memory.base = AddressOf(arena.address);
    memory.bytes = bytes;
    if (memory.read_only_fd) return memory;
    Free(std::move(memory));
    return ResourceExhausted("MEMORY_EXHAUSTED",
                             "no descriptor is left for an arena; raise RLIMIT_NOFILE");
  }

  void Free(MappedMemory memory) override {
    if (memory.base == nullptr) return;
    cuda::DeviceArena arena{reinterpret_cast<uint64_t>(memory.base), memory.bytes};
    // An error is of work long past, or the GPU is lost: either way nothing is mapped afterwards.
    (void)ops_.release_arena(device_, &arena);
  }

  Status Copy(std::span<const MemoryCopy> copies) override {
    std::vector<cuda::PageCopy> pages;
    pages.reserve(copies.size());
    for (const auto& [to, from, shape] : copies) {
      (void)host_->Reach(to);
      (void)host_->Reach(from);
      pages.push_back({to, from, {shape.width, shape.pitch, shape.rows}});
    }
    const int error = ops_.copy_pages(device_, pages.data(), pages.size());
    if (error == 0) return OkStatus();
    if (ops_.is_sticky(error)) return Lost(error);
    return Internal("COPY_FAILED", std::string("copying pages of the GPU: ") +
                                       ops_.error_text(error) + "; look at dmesg and nvidia-smi");
  }

  Status Reach(const std::byte* at) override {
    const int error = host_->Reach(at);
    if (error == 0) return OkStatus();
    if (ops_.is_sticky(error)) return Lost(error);
    return ResourceExhausted("HOST_UNREACHABLE",
                             std::string("an arena of the host pool cannot be registered with "
                                         "CUDA: ") +
                                 ops_.error_text(error) + "; look at the daemon's ulimit -l");
  }

  MemoryTraits traits() const override { return {"cuda", HandleType::kCuda, granularity_}; }

 private:
  Status Lost(int error) const {
    return Unavailable("DEVICE_FAILED",
                       std::string("the GPU answers no call of this daemon any more: ") +
                           ops_.error_text(error) +
                           "; look at dmesg and nvidia-smi, then restart kvstratad");
  }
  static std::byte* AddressOf(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

  const cuda::CudaOps& ops_;
  const int device_;
  const uint64_t granularity_;
  const std::shared_ptr<RegisteredHost> host_;
};

Status NoAnswer(const cuda::CudaOps& ops, int device, int error) {
  return Unavailable("CUDA_NO_DEVICE", "GPU " + std::to_string(device) + " does not answer: " +
                                           ops.error_text(error) + "; look at nvidia-smi");
}

// Their numbers in this process, in the order of `uuids`; without a UUID all there are.
Result<std::vector<int>> FindGpus(const cuda::CudaOps& ops, std::span<const std::string> uuids) {
  std::vector<int> all;
  std::map<std::string, int, std::less<>> by_uuid;
  std::string seen;
  for (int device = 0; device < ops.device_count(); ++device) {
    cuda::DeviceName name;
    if (const int error = ops.name_device(device, &name); error != 0) {
      return NoAnswer(ops, device, error);
    }
    all.push_back(device);
    by_uuid.emplace(name.uuid, device);
    seen += (seen.empty() ? "" : ", ") + std::string(name.uuid);
  }
  if (uuids.empty()) return all;
  std::vector<int> found;
  for (const std::string& uuid : uuids) {
    const auto at = by_uuid.find(uuid);
    if (at == by_uuid.end()) {
      return NotFound("DEVICE_UNKNOWN", "no GPU is '" + uuid + "'; this process sees " + seen);
    }
    found.push_back(at->second);
  }
  return found;
}

}  // namespace

Result<CudaDevices> NewCudaDevices(std::span<const std::string> uuids) {
  KVS_ASSIGN_OR_RETURN(const cuda::CudaOps* const ops, cuda::LoadCudaOps());
  KVS_ASSIGN_OR_RETURN(const std::vector<int> found, FindGpus(*ops, uuids));
  const auto host = std::make_shared<RegisteredHost>(*ops);
  CudaDevices gpus;
  gpus.host = std::make_unique<CudaHost>(host);
  for (const int device : found) {
    cuda::DeviceInfo info;
    if (const int error = ops->describe_device(device, &info); error != 0) {
      return NoAnswer(*ops, device, error);
    }
    gpus.devices.push_back(
        {std::make_unique<CudaMemory>(*ops, device, info.arena_granularity, host), info.uuid,
         info.free_bytes, device});
  }
  return gpus;
}

}  // namespace kvstrata
