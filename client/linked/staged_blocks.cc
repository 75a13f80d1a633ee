// SPDX-License-Identifier: Apache-2.0
#include "client/linked/staged_blocks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "client/include/kvstrata/kvstrata.h"

namespace kvstrata::client {
namespace {

constexpr int64_t kStagedBytes = int64_t{64} << 20;
constexpr int64_t kMinBlocks = 4;

template <typename Element>
void CopyElements(const StridedRows& to, const StridedRows& from, const RowsShape& shape) {
  for (int32_t head = 0; head < shape.heads; ++head) {
    // Channels outside: where one of the two is transposed its rows lie side by side.
    for (int32_t d = 0; d < shape.dim; ++d) {
      std::byte* out = to.at + head * to.head_stride + d * to.dim_stride;
      const std::byte* in = from.at + head * from.head_stride + d * from.dim_stride;
      for (int32_t row = 0; row < shape.rows; ++row) {
        std::memcpy(out + row * to.row_stride, in + row * from.row_stride, sizeof(Element));
      }
    }
  }
}

Status NoMemory(int64_t bytes) {
  return ResourceExhausted("STAGING_MEMORY", "a memfd of " + std::to_string(bytes) +
                                                 " bytes for blocks on their way to the daemon: " +
                                                 std::strerror(errno) +
                                                 "; raise this process's limits");
}

}  // namespace

void CopyRows(const StridedRows& to, const StridedRows& from, const RowsShape& shape) {
  const auto element = int64_t{shape.element_bytes};
  if (to.dim_stride != element || from.dim_stride != element) {
    if (shape.element_bytes == 2) return CopyElements<uint16_t>(to, from, shape);
    return CopyElements<uint32_t>(to, from, shape);
  }
  for (int32_t head = 0; head < shape.heads; ++head) {
    for (int32_t row = 0; row < shape.rows; ++row) {
      std::memcpy(to.at + head * to.head_stride + row * to.row_stride,
                  from.at + head * from.head_stride + row * from.row_stride,
                  static_cast<size_t>(shape.dim * element));
    }
  }
}

Result<std::unique_ptr<StagedBlocks>> StagedBlocks::Make(const LentTensor& tensor, int32_t layers,
                                                         int32_t element_bytes) {
  LentTensor shape = tensor;
  shape.kind = KVS_MEMORY_MEMFD;
  shape.address = nullptr;
  shape.dim_stride = element_bytes;
  shape.head_stride = int64_t{tensor.head_dim} * element_bytes;
  shape.slot_stride = tensor.heads * shape.head_stride;
  shape.block_stride = tensor.block_tokens * shape.slot_stride;
  const int64_t block = 2 * layers * shape.block_stride;
  shape.blocks = static_cast<int32_t>(std::clamp<int64_t>(
      kStagedBytes / block, kMinBlocks, std::max(kMinBlocks, int64_t{tensor.blocks})));
  shape.bytes = static_cast<uint64_t>(shape.blocks * block);
  UniqueFd fd(memfd_create("kvstrata-staged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ftruncate(fd.get(), static_cast<off_t>(shape.bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) != 0) {
    return NoMemory(static_cast<int64_t>(shape.bytes));
  }
  void* const at = mmap(nullptr, shape.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return NoMemory(static_cast<int64_t>(shape.bytes));
  return std::unique_ptr<StagedBlocks>(
      new StagedBlocks(std::move(fd), static_cast<std::byte*>(at), shape, element_bytes));
}

StagedBlocks::StagedBlocks(UniqueFd fd, std::byte* base, const LentTensor& shape,
                           int32_t element_bytes)
    : fd_(std::move(fd)), base_(base), shape_(shape), element_bytes_(element_bytes) {
  for (int32_t i = shape.blocks; i-- > 0;) free_.push_back(i);
}

StagedBlocks::~StagedBlocks() { munmap(base_, shape_.bytes); }

LentTensor StagedBlocks::TensorOf(int32_t layer, int side) const {
  LentTensor out = shape_;
  out.fd = fd_.get();
  out.offset = OffsetOf(layer, side);
  return out;
}

std::vector<int32_t> StagedBlocks::Take(size_t n) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto first = free_.end() - static_cast<std::ptrdiff_t>(std::min(n, free_.size()));
  std::vector<int32_t> taken(first, free_.end());
  free_.erase(first, free_.end());
  return taken;
}

void StagedBlocks::GiveBack(std::span<const int32_t> blocks) {
  std::lock_guard<std::mutex> lock(mu_);
  free_.insert(free_.end(), blocks.begin(), blocks.end());
}

void StagedBlocks::Copy(const LentTensor& tensor, int32_t layer, int side, int32_t from,
                        int32_t to) const {
  std::byte* const out = base_ + OffsetOf(layer, side) + to * shape_.block_stride;
  CopyRows({out, shape_.slot_stride, shape_.head_stride, shape_.dim_stride},
           {tensor.address + from * tensor.block_stride, tensor.slot_stride, tensor.head_stride,
            tensor.dim_stride},
           {shape_.block_tokens, shape_.heads, shape_.head_dim, element_bytes_});
}

}  // namespace kvstrata::client
