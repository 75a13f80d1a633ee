// SPDX-License-Identifier: Apache-2.0
// BlockSelector: what a plan's selector does in a decode step over an engine's own blocks: ops that
// write what each sequence of the step attends. All it knows of a sequence is on the device, so a
// captured graph serves every step of so many rows.
//
// Made by NewBlockSelector, one file a selector. Immutable but for its workspace; calls of one
// stream at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "kernels/blocks/block_index.h"
#include "kernels/blocks/block_workspace.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

// A layer of a step.
struct BlockCall {
  BlockTables tables;
  const BlockIndex* index = nullptr;
  const BlockWorkspace* workspace = nullptr;
  uint64_t layer = 0;               // its address
  const int32_t* chosen = nullptr;  // device [rows], op block_pages
  const void* q = nullptr;          // device [rows][query_heads][head_dim]
  int64_t q_stride = 0;             // elements from a row's queries to the next's
  int32_t rows = 0;
  cuda::Stream stream = nullptr;
};

class BlockSelector {
 public:
  virtual ~BlockSelector() = default;
  // Chooses, for `rows` sequences.
  virtual Status Select(const BlockCall& call) const = 0;
  // What Select wrote.
  virtual cuda::DeviceSelection SelectionOf(const BlockWorkspace& workspace) const = 0;
};

// What selectors are made of; `workspace` is asked for their pieces.
struct BlockSelectorSource {
  const Plan& plan;
  const BlockShape& shape;
  const cuda::CudaOps& ops;
  BlockWorkspace* workspace;
};

// Each in its own file.
std::unique_ptr<BlockSelector> NewBlockMinMax(const BlockSelectorSource& source);
std::unique_ptr<BlockSelector> NewBlockBits(const BlockSelectorSource& source);
std::unique_ptr<BlockSelector> NewBlockVote(const BlockSelectorSource& source);

}  // namespace kvstrata
