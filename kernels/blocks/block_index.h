// SPDX-License-Identifier: Apache-2.0
// BlockIndex: a plan's index inside an engine's own blocks. A unit of tokens lies in one block, so
// what is known of it lies behind that block's rows, and goes with the block: nobody has to be told
// when a block is given to another sequence, since it is written anew when it has filled.
//
//   minmax  minimum [kv_heads][units][head_dim], then maximum; or mean, then variance
//   bits    [kv_heads][units], groups in few bits (quantised_group.h)
//
// Addresses are distances from a layer's beginning, as op block_pages has them; ops get the layer's
// address as an offset. Immutable; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/blocks/block_shape.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

// Page tables of some sequences, and which of their tokens are new: op block_pages' outputs.
struct BlockTables {
  const uint64_t* pages = nullptr;  // device [rows][stride]
  int32_t stride = 0;
  const int32_t* from = nullptr;  // device [rows]
  const int32_t* to = nullptr;    // device [rows]
};

class BlockIndex {
 public:
  // Plans without an index have one of no bytes. INVALID_ARGUMENT BLOCK_TOKENS: a unit that does
  // not divide a block.
  static Result<BlockIndex> Of(const Plan& plan, const BlockShape& shape);

  // Bytes that it takes of a block, of one layer; a multiple of 256.
  int64_t block_bytes() const { return bytes_; }
  // Tokens of a unit; 0: there is no index.
  int32_t unit() const { return kind_ == IndexLayout::Kind::kNone ? 0 : unit_; }

  // Writes the units that tokens [from, to) of `rows` sequences complete, at most `most` of each,
  // in all layers, whose keys begin at `layers`. One kernel a layer; one for all where layers lie
  // at one distance.
  Status Write(const cuda::CudaOps& ops, std::span<const uint64_t> layers,
               const BlockTables& tables, int32_t rows, int32_t most, cuda::Stream stream) const;

  // The index of a layer at `layer`. minmax: the minima or means, whose maxima or variances lie
  // field_stride() further.
  cuda::DeviceRows RowsOf(const BlockTables& tables, uint64_t layer) const;
  cuda::DeviceGroups GroupsOf(const BlockTables& tables, uint64_t layer) const;
  int64_t field_stride() const;
  // Its keys, one row a token.
  cuda::DeviceRows KeysOf(const BlockTables& tables, uint64_t layer) const;

 private:
  BlockIndex(const Plan& plan, const BlockShape& shape);
  int32_t units() const { return shape_.block_tokens / unit_; }  // units of a block
  Status WriteLayers(const cuda::CudaOps& ops, uint64_t first, int32_t layers, int64_t stride,
                     const BlockTables& tables, int32_t rows, int32_t most,
                     cuda::Stream stream) const;

  BlockShape shape_;
  IndexLayout::Kind kind_;
  int32_t unit_, bits_;
  int64_t bytes_ = 0;
};

}  // namespace kvstrata
