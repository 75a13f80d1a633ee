// SPDX-License-Identifier: Apache-2.0
#include "server/work/block_rows.h"

namespace kvstrata {
namespace {

struct Axis {
  int64_t n = 0, stride = 0;
  int64_t span(int64_t element) const { return (n - 1) * stride + element; }
};

}  // namespace

BlockRows::BlockRows(const BlockTensor& tensor, int64_t row_bytes) : tensor_(tensor) {
  const Axis slots{tensor.block_tokens, tensor.slot_stride},
      heads{tensor.heads, tensor.head_stride};
  const bool heads_inside = heads.n == 1 || (slots.n > 1 && heads.stride <= slots.stride);
  const Axis& inner = heads_inside ? heads : slots;
  const Axis& outer = heads_inside ? slots : heads;
  int64_t inner_pitch = inner.stride, outer_pitch = outer.stride;
  const int64_t inner_span = inner.span(row_bytes), whole = outer.span(inner_span);
  if (inner_span > 2 * inner.n * row_bytes) {
    pieces_ = inner.n * outer.n;
    piece_bytes_ = inner_pitch = row_bytes;
    outer_pitch = inner.n * row_bytes;
    inner_ = inner.n;
    inner_stride_ = inner.stride;
    outer_stride_ = outer.stride;
  } else if (whole > 2 * inner.n * outer.n * row_bytes) {
    pieces_ = outer.n;
    piece_bytes_ = outer_pitch = inner_span;
    outer_stride_ = outer.stride;
  } else {
    piece_bytes_ = whole;
  }
  slot_pitch_ = heads_inside ? outer_pitch : inner_pitch;
  head_pitch_ = heads_inside ? inner_pitch : outer_pitch;
}

void BlockRows::AddPieces(int32_t block, std::vector<TensorMemory::Piece>* pieces) const {
  const uint64_t begin = tensor_.offset + static_cast<uint64_t>(block * tensor_.block_stride);
  for (int64_t i = 0; i < pieces_; ++i) {
    const int64_t at = i / inner_ * outer_stride_ + i % inner_ * inner_stride_;
    pieces->push_back({begin + static_cast<uint64_t>(at), static_cast<uint64_t>(piece_bytes_)});
  }
}

}  // namespace kvstrata
