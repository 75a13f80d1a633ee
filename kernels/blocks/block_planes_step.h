// SPDX-License-Identifier: Apache-2.0
// BlockPlanesStep: what of a step over an engine's own blocks the ops of plan strata read on the
// GPU, row by row: where blocks and slots lie, how many tokens are sealed, what is full. A part of
// BlockPlanes; as it.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/blocks/block_workspace.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

struct BlockPlanesShape {
  Geometry geometry;         // its page_tokens are not looked at
  int64_t block_stride = 0;  // bytes, a multiple of 32: a block lies at layer + id * block_stride
  int32_t slots = 0;         // requests that may be under way
  int32_t max_rows = 0;      // sequences of a step
  int32_t max_tokens = 0;    // that a sequence may have

  static constexpr int32_t kUnit = 64;  // tokens of a group, of a block and of a slot
  int32_t BlocksOfRow() const { return (max_tokens + kUnit - 1) / kUnit; }
  PageLayout SlotLayout() const;                                                // a layer's
  int64_t SlotLayerBytes() const { return slots * SlotLayout().layer_stride; }  // all slots'
};

// A step's sequences: first those that decode, one new token each, then those that are of prompts.
// Device memory.
struct BlockPlanesBatch {
  const int32_t* blocks = nullptr;        // [rows][blocks_of_row]: ids
  int64_t blocks_of_row = 0;              // from a row's ids to the next's
  const int32_t* tokens = nullptr;        // [rows], with the new ones
  const int32_t* query_starts = nullptr;  // [rows + 1]: the rows' new tokens
  const int32_t* slots = nullptr;         // [rows]; below 0: a row that pads
  const uint8_t* in_full = nullptr;  // [rows], or null: decoding rows that attend all of it finely
  int32_t rows = 0;
  int32_t decodes = 0;
};

// A table of blocks as distances from a layer's first, for upper runs and for lower ones: two where
// these lie apart.
struct RunTables {
  uint64_t *upper = nullptr, *lower = nullptr;
};

// Device addresses of what ops block_pages and block_slots write, from some row on.
struct PlanesTables {
  RunTables blocks;       // [rows][BlocksOfRow()]
  RunTables seal_blocks;  // [rows]
  uint64_t* slots = nullptr;
  int32_t *from = nullptr, *to = nullptr;
  int32_t *tokens = nullptr, *raw = nullptr, *groups = nullptr;
  int32_t *seal_from = nullptr, *seal_to = nullptr;
  int32_t* tails = nullptr;  // [rows][2]
  uint32_t* step = nullptr;  // another number in each step; with lower runs apart
};

class BlockPlanesStep {
 public:
  // Its pieces are asked for here. `ops` and `workspace` outlive it. lower_stride: from a block's
  // lower runs to the next one's, where they lie apart; 0: they are in its block.
  BlockPlanesStep(const BlockPlanesShape& shape, int64_t lower_stride, const cuda::CudaOps& ops,
                  BlockWorkspace* workspace);

  // The workspace was given anew: there are no rows.
  void Forget() { rows_ = decodes_ = 0; }
  // min_tokens: the plan's. INVALID_ARGUMENT BLOCK_ROWS.
  Status Write(const BlockPlanesBatch& batch, int32_t min_tokens, cuda::Stream stream);

  PlanesTables From(int32_t row) const;
  bool is_lower_apart() const { return lower_stride_ > 0; }
  bool has_prompts() const { return rows_ > decodes_; }
  bool IsPrompt(int32_t row) const { return row >= decodes_ && row < rows_; }

 private:
  // Blocks of so many bytes, with their tables.
  struct Blocks {
    int64_t stride = 0;
    uint64_t *table = nullptr, *seal = nullptr;
  };

  Status WritePages(const BlockPlanesBatch& batch, const Blocks& blocks, int32_t capacity,
                    cuda::Stream stream) const;
  Status WriteSlots(const BlockPlanesBatch& batch, const Blocks& blocks, int32_t capacity,
                    int32_t min_tokens, cuda::Stream stream) const;

  const BlockPlanesShape shape_;
  const int64_t lower_stride_;
  const cuda::CudaOps& ops_;
  const BlockWorkspace& workspace_;
  BlockWorkspace::Piece<uint64_t> blocks_, slots_, seal_blocks_;
  BlockWorkspace::Piece<uint64_t> lower_blocks_, lower_seal_blocks_;
  BlockWorkspace::Piece<int32_t> lengths_, chosen_, from_, to_;
  BlockWorkspace::Piece<int32_t> tokens_, raw_, groups_, seal_from_, seal_to_, tails_;
  BlockWorkspace::Piece<uint32_t> step_;
  int32_t rows_ = 0, decodes_ = 0;  // the last Write's
};

}  // namespace kvstrata
