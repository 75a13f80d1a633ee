// SPDX-License-Identifier: Apache-2.0
// Op block_pages on the GPU: an engine's block table as the page tables that all ops take.
//
// Row b of the batch is a sequence. Its block i lies block_stride * blocks[b][i] bytes from where
// its layer begins, whatever the layer is: `pages` has that distance, and ops are given a layer's
// address as their offset. Of each row besides:
//   lengths   tokens, the query's own included; 0 from `rows` on
//   chosen    lengths, or 0 where everything is to be attended: ops that choose read it
//   from, to  the tokens that this batch adds: [from, to), as ops summarize and quantise_keys take
//   sink_end, recent_begin  what is attended under `window`, whatever a query is; null: not wanted
//
// A row without a block has one entry, of block 0: ops read a row of a sequence without any.
// One kernel.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/candidates.h"

namespace kvstrata::cuda {

struct BlockPagesBatch {
  const int32_t* blocks = nullptr;        // device [rows][blocks_of_row]
  int64_t blocks_of_row = 0;              // from a row's blocks to the next's
  const int32_t* tokens = nullptr;        // device [rows]; null: all blocks are full
  const int32_t* query_starts = nullptr;  // device [rows + 1]; null: all tokens are new
  const uint8_t* in_full = nullptr;       // device [rows], or null: of none
  int32_t rows = 0;
  int32_t block_tokens = 16;
  int64_t block_stride = 0;  // bytes
  CandidateRule window;      // unit_tokens 1, take 0
  // Written, all of them on the device: pages [capacity][page_stride], the others [capacity]. A row
  // has at most page_stride blocks; of `rows` to capacity there are none.
  int32_t capacity = 0;
  uint64_t* pages = nullptr;
  int32_t page_stride = 0;
  int32_t *lengths = nullptr, *chosen = nullptr, *from = nullptr, *to = nullptr;
  int32_t *sink_end = nullptr, *recent_begin = nullptr;
  int32_t sampled = -1;            // to *sampled_row, as it is
  int32_t* sampled_row = nullptr;  // device; null: not wanted
};

// cudaErrorInvalidValue for a shape that it does not take.
int BlockPagesCuda(const BlockPagesBatch& work, Stream stream);

}  // namespace kvstrata::cuda
