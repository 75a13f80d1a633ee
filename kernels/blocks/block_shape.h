// SPDX-License-Identifier: Apache-2.0
// BlockShape: a model's keys and values in an engine's own blocks on a GPU, and how large a decode
// step may be. What BlockAttention is made for.
//
// A layer is a tensor of blocks of block_tokens tokens. Token t of KV head h of a block lies at
//     layer + block * block_stride + h * head_stride + t * slot_stride
// and its value value_offset further. A plan's index lies index_offset behind a block's beginning
// (block_index.h). Values; pure functions; any thread.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct BlockShape {
  Geometry geometry;          // its page_tokens are not looked at
  int32_t block_tokens = 16;  // 16, 32, 64 or 128
  // Bytes, multiples of 16.
  int64_t block_stride = 0, head_stride = 0, slot_stride = 0, value_offset = 0, index_offset = 0;
  int32_t max_rows = 0;     // sequences of a step
  int32_t max_decodes = 0;  // how many of them, in front, attend by the plan
  int32_t max_tokens = 0;   // that a sequence may have

  int32_t BlocksOfRow() const { return (max_tokens + block_tokens - 1) / block_tokens; }
};

// INVALID_ARGUMENT BLOCK_SHAPE, with the field and its value; UNIMPLEMENTED CUDA_MODEL.
Status CheckBlockShape(const BlockShape& shape);

}  // namespace kvstrata
