// SPDX-License-Identifier: Apache-2.0
// BlockRows: where the rows of an engine's blocks lie, [slot][head] by any strides, and how they
// are fetched. Op append puts them into pages.
//
// A block is fetched as few pieces: one when its rows lie close together (at most as much between
// them as there is of them: a tensor with K and V side by side is read whole), else one for each
// slot or head, else one for each row.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops/append/append.h"
#include "server/memory/tensor_memory.h"
#include "server/store/requests/imported_tensors.h"

namespace kvstrata {

class BlockRows {
 public:
  BlockRows(const BlockTensor& tensor, int64_t row_bytes);

  // The size of one block, fetched.
  uint64_t bytes() const { return static_cast<uint64_t>(pieces_) * piece_bytes_; }
  void AddPieces(int32_t block, std::vector<TensorMemory::Piece>* pieces) const;

  // The rows of a fetched block, from `slot` on.
  SourceRows RowsOf(const std::byte* fetched, int32_t slot, DType dtype) const {
    return {fetched + slot * slot_pitch_, slot_pitch_, head_pitch_, dtype};
  }

 private:
  const BlockTensor tensor_;
  int64_t pieces_ = 1, piece_bytes_ = 0;
  // Distances from a slot, and from a head, to the next in what is fetched.
  int64_t slot_pitch_ = 0, head_pitch_ = 0;
  // Piece i begins (i / inner_) outer strides and (i % inner_) inner strides behind the block.
  int64_t inner_ = 1, inner_stride_ = 0, outer_stride_ = 0;
};

}  // namespace kvstrata
