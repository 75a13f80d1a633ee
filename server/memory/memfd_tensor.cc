// SPDX-License-Identifier: Apache-2.0
// An engine's tensors in a memfd. Read by pread, through a duplicate of the engine's descriptor.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "server/memory/tensor_memory.h"

namespace kvstrata {
namespace {

class MemfdTensor final : public TensorMemory {
 public:
  explicit MemfdTensor(UniqueFd fd) : fd_(std::move(fd)) {}

  Status Read(std::span<const Piece> pieces, std::byte* to) override {
    for (const Piece& piece : pieces) {
      KVS_RETURN_IF_ERROR(ReadPiece(piece, to));
      to += piece.bytes;
    }
    return OkStatus();
  }

 private:
  Status ReadPiece(const Piece& piece, std::byte* to) const {
    for (uint64_t done = 0; done < piece.bytes;) {
      const ssize_t n =
          pread(fd_.get(), to + done, piece.bytes - done, static_cast<off_t>(piece.offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        return Internal("TENSOR_READ", "reading " + std::to_string(piece.bytes) + " bytes at " +
                                           std::to_string(piece.offset) + " of a memfd: " +
                                           (n == 0 ? "it ends there" : std::strerror(errno)) +
                                           "; seal the blocks again");
      }
      done += static_cast<uint64_t>(n);
    }
    return OkStatus();
  }

  const UniqueFd fd_;
};

}  // namespace

Result<std::unique_ptr<TensorMemory>> OpenMemfdTensor(const TensorHandle& handle) {
  // Only what lies in memory has seals: a read of anything else may wait for somebody.
  const int seals = fcntl(handle.fd, F_GET_SEALS);
  if (seals < 0) {
    return InvalidArgument("TENSOR_HANDLE", "fd is no memfd (" + std::string(std::strerror(errno)) +
                                                "); allow sealing where it is made "
                                                "(MFD_ALLOW_SEALING)");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return InvalidArgument("TENSOR_HANDLE",
                           "fd is a memfd that may still shrink; add F_SEAL_SHRINK to it");
  }
  struct stat st {};
  if (fstat(handle.fd, &st) != 0 || handle.bytes > static_cast<uint64_t>(st.st_size)) {
    return InvalidArgument("TENSOR_HANDLE", "bytes is " + std::to_string(handle.bytes) +
                                                "; the memfd has " + std::to_string(st.st_size));
  }
  UniqueFd fd(fcntl(handle.fd, F_DUPFD_CLOEXEC, 0));
  if (!fd) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise LimitNOFILE");
  }
  char byte = 0;
  if (handle.bytes > 0 && pread(fd.get(), &byte, 1, 0) != 1) {
    return InvalidArgument("TENSOR_HANDLE", "fd cannot be read (" +
                                                std::string(std::strerror(errno)) +
                                                "); pass one that is open for reading");
  }
  return std::unique_ptr<TensorMemory>(new MemfdTensor(std::move(fd)));
}

Result<std::unique_ptr<TensorMemory>> OpenTensor(const TensorHandle& handle,
                                                 const TensorDevice& device) {
  if (handle.bytes == 0) {
    return InvalidArgument("TENSOR_HANDLE", "bytes is 0; say how long the memory is");
  }
  if (handle.kind == TensorKind::kMemfd) return OpenMemfdTensor(handle);
  if (device.ops != nullptr) return OpenCudaTensor(handle, device);
  return Unimplemented("TENSOR_KIND",
                       "kind is " + std::to_string(static_cast<uint32_t>(handle.kind)) +
                           ", memory of a GPU, and this daemon has none (pool.device); allowed: 1 "
                           "(memfd)");
}

}  // namespace kvstrata
