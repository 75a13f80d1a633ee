// SPDX-License-Identifier: Apache-2.0
// Op block_slots on the GPU: what the ops of plan strata read of each row of a step over an
// engine's own blocks, behind op block_pages. A row is a sequence; of its N tokens S = unit
// floor((N - 1) / unit) are sealed. The others are in its slot, from row 0 of it on.
//
// Rows that decode:  tokens N, as op attend_planes has it: 0 for rows of `in_full` or below
//                    min_tokens; raw N - S, groups S / unit; seal_from N - S - 1 and seal_to N - S,
//                    tokens of the slot, with the block of group S / unit in seal_blocks: by these
//                    op pack_planes sees a sequence of one group, and seals it once it is full
// Rows that are of a prompt: tails {0, N % unit}, as op append's starts and, behind it, its tokens.
// Rows of both kinds: slots, the slot's distance from a layer's first one. All else is 0, and a row
// that pads has nothing but 0.
// One kernel, a thread a row.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

struct BlockSlotsBatch {
  // Op block_pages' outputs, [capacity]; blocks of `unit` tokens.
  const uint64_t* pages = nullptr;  // device [capacity][page_stride]
  int32_t page_stride = 0;
  const int32_t* lengths = nullptr;
  // The engine's, device [rows].
  const int32_t* slot_ids = nullptr;  // below 0: a row that pads
  const uint8_t* in_full = nullptr;   // null: none
  int32_t rows = 0, decodes = 0, capacity = 0;
  int32_t unit = 64, min_tokens = 0;
  int64_t slot_bytes = 0;  // a layer's
  // Written, device [capacity]; of `rows` to capacity, too.
  uint64_t *slots = nullptr, *seal_blocks = nullptr;
  int32_t *tokens = nullptr, *raw = nullptr, *groups = nullptr;
  int32_t *seal_from = nullptr, *seal_to = nullptr;
  int32_t* tails = nullptr;  // [capacity][2]
  uint32_t* step = nullptr;  // device, counted on; null: nobody asks
};

// cudaErrorInvalidValue for a shape that it does not take.
int BlockSlotsCuda(const BlockSlotsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
