// SPDX-License-Identifier: Apache-2.0
#include "client/linked/page_map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_library.h"

namespace kvstrata::client {
namespace {

Status SegmentInvalid(std::string_view what, const std::string& why) {
  return {Code::kDataLoss, "SEGMENT_INVALID",
          std::string(what) + " from the daemon: " + why +
              "; daemon and library differ, or the "
              "socket belongs to something else"};
}

Status VerifySealed(int fd, uint64_t bytes, std::string_view what) {
  struct stat st {};
  if (fstat(fd, &st) != 0) return SegmentInvalid(what, std::strerror(errno));
  if (static_cast<uint64_t>(st.st_size) != bytes || bytes == 0) {
    return SegmentInvalid(
        what, "size " + std::to_string(st.st_size) + ", announced " + std::to_string(bytes));
  }
  // Without F_SEAL_SHRINK the other side could truncate the file and fault our reads.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return SegmentInvalid(what, "not sealed against shrinking");
  }
  return OkStatus();
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Mapping::Abandon() { data_ = nullptr; }

Result<Mapping> Mapping::Of(int fd, uint64_t bytes, bool writable, std::string_view what) {
  KVS_RETURN_IF_ERROR(VerifySealed(fd, bytes, what));
  void* at = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                  MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) {
    return ResourceExhausted("MAP_FAILED", "mapping " + std::to_string(bytes) + " bytes of " +
                                               std::string(what) + ": " + std::strerror(errno) +
                                               "; raise the address-space limit (ulimit -v)");
  }
  madvise(at, bytes, MADV_DONTFORK);
  madvise(at, bytes, MADV_DONTDUMP);
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(at);
  mapping.bytes_ = bytes;
  return mapping;
}

Result<Gpu> FindGpu(std::string_view uuid) {
  KVS_ASSIGN_OR_RETURN(const cuda::CudaOps* const ops, cuda::LoadCudaOps());
  cuda::DeviceName name;
  for (int device = 0; device < ops->device_count(); ++device) {
    if (ops->name_device(device, &name) == 0 && uuid == name.uuid) return Gpu{ops, device};
  }
  return NotFound("DEVICE_UNKNOWN",
                  "the daemon's pages lie on " + std::string(uuid) +
                      ", which this process does not see; check CUDA_VISIBLE_DEVICES");
}

void PageMap::Use(const Gpu& gpu) {
  MutexLock lock(mu_);
  gpu_ = gpu;
}

Status PageMap::Map(Arena* arena) {
  if (!arena->on_gpu) {
    KVS_ASSIGN_OR_RETURN(arena->mapping,
                         Mapping::Of(arena->fd.get(), arena->bytes, arena->writable, "an arena"));
  } else if (gpu_.ops == nullptr) {
    return SegmentInvalid("an arena", "memory of a GPU, but the welcome names none");
  }
  if (gpu_.ops == nullptr) return OkStatus();
  const int error =
      arena->on_gpu
          ? gpu_.ops->import_arena(gpu_.device, arena->fd.get(), arena->bytes, arena->writable,
                                   &arena->device)
          : gpu_.ops->register_host(arena->mapping.data(), arena->bytes, !arena->writable);
  if (error == 0) return OkStatus();
  return ResourceExhausted("MAP_FAILED", "mapping an arena of " + std::to_string(arena->bytes) +
                                             " bytes for the GPU: " + gpu_.ops->error_text(error) +
                                             "; look at nvidia-smi and at ulimit -l");
}

void PageMap::Add(const shm::Arena& arena, UniqueFd fd) {
  MutexLock lock(mu_);
  // An arena that comes twice is the same memory; addresses given out must stay.
  auto [it, fresh] = arenas_.try_emplace(arena.arena);
  if (!fresh) return;
  it->second.fd = std::move(fd);
  it->second.bytes = arena.bytes;
  it->second.writable = arena.writable != 0;
  it->second.on_gpu = arena.memory != 0;
}

Result<std::byte*> PageMap::Resolve(const shm::PageEntry& entry, uint64_t bytes) {
  MutexLock lock(mu_);
  const auto it = arenas_.find(entry.arena);
  if (it == arenas_.end()) {
    return NotFound("ARENA_UNKNOWN", "arena " + std::to_string(entry.arena) + " has not arrived");
  }
  Arena& arena = it->second;
  if (bytes > arena.bytes || entry.offset > arena.bytes - bytes) {
    return Status(Code::kDataLoss, "TABLE_INVALID",
                  "offset " + std::to_string(entry.offset) + " + " + std::to_string(bytes) +
                      " lies outside arena " + std::to_string(entry.arena) + " of " +
                      std::to_string(arena.bytes) + " bytes; detach and attach anew");
  }
  if (arena.fd) {
    KVS_RETURN_IF_ERROR(Map(&arena));
    arena.fd.Reset();
  }
  return arena.base() + entry.offset;
}

bool PageMap::Writable(const shm::PageEntry& entry) {
  constexpr uint16_t kNotOurs = shm::kPageShared | shm::kPageSealed | shm::kPageAbsent;
  if ((entry.flags & kNotOurs) != 0) return false;
  MutexLock lock(mu_);
  const auto it = arenas_.find(entry.arena);
  return it != arenas_.end() && it->second.writable;
}

void PageMap::Clear() {
  MutexLock lock(mu_);
  if (gpu_.ops != nullptr) {
    for (auto& [id, arena] : arenas_) {
      // Errors are those of work long past: nothing can be done about them here.
      if (arena.device.address != 0) (void)gpu_.ops->release_arena(gpu_.device, &arena.device);
      if (arena.mapping.data() != nullptr) (void)gpu_.ops->unregister_host(arena.mapping.data());
    }
  }
  arenas_.clear();
}

void PageMap::AbandonAfterFork() {
  // No lock: another thread may have held it at the fork, and this process has one thread.
  for (auto& [id, arena] : arenas_) {
    arena.mapping.Abandon();
    arena.device = {};
  }
}

}  // namespace kvstrata::client
