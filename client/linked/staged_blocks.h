// SPDX-License-Identifier: Apache-2.0
// StagedBlocks: how blocks of memory that only this process can read reach the daemon. They are
// copied into a memfd that the daemon reads in their place (KVS_MEMORY_PROCESS).
//
// Threads: Take and GiveBack any; a block that is taken is its taker's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "client/session.h"

namespace kvstrata::client {

// Rows of several heads, [row][head][dim] by strides in bytes.
struct StridedRows {
  std::byte* at = nullptr;
  int64_t row_stride = 0, head_stride = 0, dim_stride = 0;
};
struct RowsShape {
  int32_t rows = 0, heads = 0, dim = 0, element_bytes = 0;
};
// Cost: a memcpy a row and head where both lie contiguous, else a load and a store an element.
void CopyRows(const StridedRows& to, const StridedRows& from, const RowsShape& shape);

class StagedBlocks {
 public:
  // Room for 64 MiB of blocks like those of `tensor`, all layers of them, at least 4.
  // RESOURCE_EXHAUSTED STAGING_MEMORY.
  static Result<std::unique_ptr<StagedBlocks>> Make(const LentTensor& tensor, int32_t layers,
                                                    int32_t element_bytes);
  ~StagedBlocks();

  // What the daemon is told in place of a layer's tensor; side 0: keys, 1: values.
  LentTensor TensorOf(int32_t layer, int side) const;
  int32_t blocks() const { return shape_.blocks; }
  // Up to n free blocks.
  std::vector<int32_t> Take(size_t n);
  void GiveBack(std::span<const int32_t> blocks);
  // Block `from` of the engine's tensor of a layer, into `to`.
  void Copy(const LentTensor& tensor, int32_t layer, int side, int32_t from, int32_t to) const;

 private:
  StagedBlocks(UniqueFd fd, std::byte* base, const LentTensor& shape, int32_t element_bytes);
  int64_t side_bytes() const { return shape_.blocks * shape_.block_stride; }
  uint64_t OffsetOf(int32_t layer, int side) const {
    return static_cast<uint64_t>((2 * layer + side) * side_bytes());
  }

  const UniqueFd fd_;
  std::byte* const base_;
  const LentTensor shape_;  // one layer's keys, without an offset
  const int32_t element_bytes_;
  std::mutex mu_;
  std::vector<int32_t> free_;
};

}  // namespace kvstrata::client
