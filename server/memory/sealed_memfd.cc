// SPDX-License-Identifier: Apache-2.0
#include "server/memory/sealed_memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace kvstrata {
namespace {

Status SystemError(const char* call, uint64_t bytes) {
  const int error = errno;
  return ResourceExhausted("MEMORY_EXHAUSTED", std::string(call) + " for " + std::to_string(bytes) +
                                                   " bytes failed: " + std::strerror(error) +
                                                   "; check memory, RLIMIT_NOFILE, RLIMIT_FSIZE, "
                                                   "RLIMIT_AS and /proc");
}

}  // namespace

Result<MappedMemory> MapSealedMemfd(const char* name, uint64_t bytes, Writers writers) {
  if (bytes == 0 || bytes % kMemoryGranularity != 0) {
    return InvalidArgument("MEMORY_SIZE", "bytes is " + std::to_string(bytes) +
                                              "; allowed: positive multiples of 4096");
  }
  MappedMemory memory;
  memory.bytes = bytes;
  memory.fd.Reset(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd) return SystemError("memfd_create", bytes);
  if (ftruncate(memory.fd.get(), static_cast<off_t>(bytes)) != 0) {
    return SystemError("ftruncate", bytes);
  }
  // A memfd is born 0777: whoever holds a read-only descriptor could open it again for writing.
  if (fchmod(memory.fd.get(), 0600) != 0) return SystemError("fchmod", bytes);
  const std::string self = "/proc/self/fd/" + std::to_string(memory.fd.get());
  memory.read_only_fd.Reset(open(self.c_str(), O_RDONLY | O_CLOEXEC));
  if (!memory.read_only_fd) return SystemError("open read-only", bytes);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd.get(), 0);
  if (at == MAP_FAILED) return SystemError("mmap", bytes);
  memory.base = static_cast<std::byte*>(at);
  // Behind our own mapping: whoever opens the file anew, as our own user may through /proc, maps
  // and writes nothing any more.
  const int future = writers == Writers::kOne ? F_SEAL_FUTURE_WRITE : 0;
  if (fcntl(memory.fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL | future) !=
      0) {
    const Status status = SystemError("F_ADD_SEALS", bytes);
    munmap(at, bytes);
    return status;
  }
  if (madvise(at, bytes, MADV_DONTDUMP) != 0 || madvise(at, bytes, MADV_DONTFORK) != 0) {
    const Status status = SystemError("madvise", bytes);
    munmap(at, bytes);
    return status;
  }
  return memory;
}

void UnmapSealedMemfd(MappedMemory memory) {
  if (memory.base == nullptr) return;
  // If the hole cannot be punched (nobody can where the daemon alone writes) the memory returns
  // when the last mapping and descriptor go: later, not never.
  (void)fallocate(memory.fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(memory.bytes));
  munmap(memory.base, memory.bytes);
}

}  // namespace kvstrata
