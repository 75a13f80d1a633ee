// SPDX-License-Identifier: Apache-2.0
// BlockAttention: a plan's attention of decode steps over an engine's own blocks on a GPU. The
// engine keeps its blocks, its scheduler and its graphs; nothing is asked of a daemon.
//
//     KVS_ASSIGN_OR_RETURN(auto attention, BlockAttention::Make(plan, shape, ops));
//     attention->Bind(layers, workspace);          // once
//     attention->Begin(batch, stream);             // a step, outside of graphs
//     attention->Attend(layer, {q, q_stride}, out, rows, stream);   // a layer, captured or not
//
// What Attend enqueues depends on `rows` alone, and reads everything else where Begin wrote it. So
// a graph that captured it for so many rows serves every later step of at most as many: rows beyond
// the batch's attend nothing, and what they write is of no meaning.
//
// Begin may name a row whose queries are kept as the step attends. Behind the step Audit attends
// with them once more, by the plan and in full, so that what the plan loses can be told without a
// word in a replay.
//
// A unit's index is written by the Begin behind the step that completed it, before any step chooses
// by it. Rows whose content comes otherwise, by a copy from elsewhere say, are told by Index.
//
// Threads: one call at a time. Calls of one instance are of one stream, or ordered by it. Cost:
// Begin one kernel, and one more where a unit was completed; Attend two to four; Audit those of an
// Attend of one row, and one that reads all of the row's keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/blocks/block_selector.h"

namespace kvstrata {

// A layer's queries, device [rows][query_heads][head_dim]; the address is a multiple of 16.
struct BlockQueries {
  const void* data = nullptr;
  int64_t stride = 0;  // bytes from a row's to the next's, a multiple of 16
};

// A step's sequences, all of its rows, whether they decode or are of a prompt. Device memory.
struct BlockBatch {
  const int32_t* blocks = nullptr;        // [rows][blocks_of_row]: ids
  int64_t blocks_of_row = 0;              // from a row's ids to the next's
  const int32_t* tokens = nullptr;        // [rows], with the new ones
  const int32_t* query_starts = nullptr;  // [rows + 1]: the rows' new tokens
  // [rows], or null: rows that attend everything, whatever the plan: a prompt's last token.
  const uint8_t* in_full = nullptr;
  int32_t rows = 0;
  int32_t new_tokens = 0;  // that a row has, at most; 0: none completes a unit
  int32_t sampled = -1;    // a row that decodes, for Audit; -1: none
};

// What Audit gives: the plan's, then full attention's. Device memory, or page-locked of the host.
struct BlockAuditOutput {
  float* rows = nullptr;  // [2][query_heads][head_dim], 16-byte aligned
  float* lse = nullptr;   // [2][query_heads], natural logarithms
};

class BlockAttention {
 public:
  // Bytes of index that a plan needs behind each block of a layer, whatever else a shape says than
  // geometry and block_tokens. UNIMPLEMENTED BLOCK_PLAN: plans that need a state by sequence.
  static Result<int64_t> IndexBytes(const Plan& plan, const BlockShape& shape);

  // Errors as IndexBytes and CheckBlockShape. `ops` outlives it.
  static Result<std::unique_ptr<BlockAttention>> Make(const Plan& plan, const BlockShape& shape,
                                                      const cuda::CudaOps& ops);

  // The memory that Bind takes has so many.
  int64_t workspace_bytes() const { return workspace_.bytes(); }
  int32_t unit_tokens() const { return index_.unit(); }    // unit of its index; 0: it has none
  int32_t min_tokens() const { return plan_.min_tokens; }  // shorter sequences attend everything
  // layers: the address of each layer's first key. workspace: device memory, all zero.
  // INVALID_ARGUMENT BLOCK_LAYERS.
  Status Bind(std::span<const uint64_t> layers, void* workspace);

  // FAILED_PRECONDITION BLOCK_UNBOUND before Bind, here and below. INVALID_ARGUMENT BLOCK_ROWS:
  // more rows than max_rows, or in Attend than max_decodes.
  Status Begin(const BlockBatch& batch, cuda::Stream stream);

  // The first `rows` rows; out [rows][query_heads][head_dim], contiguous. INVALID_ARGUMENT
  // BLOCK_QUERIES.
  Status Attend(int32_t layer, const BlockQueries& q, void* out, int32_t rows, cuda::Stream stream);

  // A layer of the row that the last Begin named, whose step has been enqueued. What the plan
  // attended of full attention's mass is exp(lse[0] - lse[1]). FAILED_PRECONDITION BLOCK_SAMPLE: no
  // row was named, or Index was called since.
  Status Audit(int32_t layer, const BlockAuditOutput& out, cuda::Stream stream);

  // Blocks that were filled otherwise than by steps: device [count] ids. Between steps.
  Status Index(const int32_t* blocks, int32_t count, cuda::Stream stream);

 private:
  BlockAttention(const Plan& plan, const BlockShape& shape, const cuda::CudaOps& ops,
                 BlockIndex index);

  // Rows of the step's tables.
  struct RowRange {
    int32_t first = 0, count = 0;
  };

  Status CheckRows(std::string_view limit, int32_t rows, int32_t most) const;
  bool Chooses(int32_t layer) const;
  cuda::BlockPagesBatch PagesOf(int32_t rows);
  BlockTables TablesFrom(int32_t row) const;
  // What a layer's rows attend by the plan. Chooses, where queries decide.
  Result<cuda::DeviceSelection> Select(int32_t layer, RowRange rows, const BlockQueries& q,
                                       cuda::Stream stream) const;
  // Those rows over everything.
  cuda::AttendRawBatch AttendOf(int32_t layer, RowRange rows, const BlockQueries& q) const;
  std::byte* KeptOf(int32_t layer) const;

  const Plan plan_;
  const BlockShape shape_;
  const cuda::CudaOps& ops_;
  const BlockIndex index_;
  BlockWorkspace workspace_;
  BlockWorkspace::Piece<uint64_t> pages_;
  BlockWorkspace::Piece<int32_t> lengths_, chosen_, from_, to_, sink_end_, recent_begin_;
  BlockWorkspace::Piece<int32_t> sampled_row_;
  BlockWorkspace::Piece<std::byte> kept_;  // the sampled row's queries, layer after layer
  BlockWorkspace::Piece<std::byte> attend_scratch_;
  std::unique_ptr<BlockSelector> selector_;  // null: no query decides
  std::vector<uint64_t> layers_;
  // What the last Begin's step completes, at most: rows, and units of a row.
  int32_t pending_rows_ = 0, pending_units_ = 0;
  int32_t last_rows_ = 0;  // that the tables have, of whatever call
  int32_t sampled_ = -1;   // row of the last Begin
};

}  // namespace kvstrata
