// SPDX-License-Identifier: Apache-2.0
// BlockPlanes: plan strata over an engine's own blocks on a GPU (docs/spec/planes.md). The engine
// keeps its blocks, its scheduler and its graphs; nothing is asked of a daemon.
//
//     KVS_ASSIGN_OR_RETURN(auto planes, BlockPlanes::Make(plan, shape, ops));
//     planes->Bind(layers, workspace);                      // once
//     planes->BindLower(lower_layers);                      // with lower = "host"
//     planes->Begin(batch, stream);                         // a step, outside of graphs
//     planes->Decode(layer, step, out, rows, stream);       // a layer, captured or not
//     planes->Prompt(layer, chunk, k, v, all, stream);      // each row that is of a prompt
//
// A block of a layer is one sealed group of each KV head: the upper runs of all heads, then their
// lower ones. With lower = "host" these lie apart, in memory of the host that is registered with
// CUDA, which kernels read and write over the bus, and a block has copies of some of their rows
// behind its upper runs (cuda::DevicePlanes). Rows of tokens whose group is not full yet lie
// in the slot of their request, in the workspace: [layer][slot], each a page of 64 tokens
// (PageLayout). With N tokens a step's own among them, S = 64 floor((N - 1) / 64) are sealed, and
// token t of the others is row t - S of the slot. So nobody has to be told when a block or a slot
// is given to another request.
//
// What Decode enqueues depends on `rows` and on whether the last Begin had prompts; everything else
// is read where Begin wrote it. So a graph that captured it for so many rows serves every later
// step of at most as many: rows beyond the batch's attend nothing, and write nothing but outputs of
// no meaning.
//
// Threads: one call at a time. Calls of one instance are of one stream, or ordered by it. Cost:
// Begin two kernels, four with lower = "host"; Decode three, and one more for each layer, or where
// layers lie at one distance for all of them; Prompt one to three, which read each sealed group
// once and write all rows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/blocks/block_planes_step.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

// What an engine makes its blocks by.
struct BlockPlanesForm {
  int64_t token_bytes = 0;        // for each token and KV head
  int64_t slot_bytes = 0;         // for each slot, in the workspace
  int64_t lower_token_bytes = 0;  // beside token_bytes, on the host; 0: lower runs are in blocks
};

// Rows of tokens, [tokens][heads][head_dim]: the address and the stride, in bytes from a token's to
// the next's, are multiples of 16.
struct TokenRows {
  void* data = nullptr;
  int64_t stride = 0;
};

// What a step adds to a layer: of each decoding row its queries, key and value.
struct DecodedRows {
  TokenRows q, k, v;
};

// New tokens of a row of a prompt.
struct PromptChunk {
  int32_t row = 0;                // its number in the step
  int32_t before = 0, count = 0;  // tokens that were there; those that are new, as Begin was told
  TokenRows k, v;                 // [count][kv_heads]
};

// Where all rows of a sequence go, [before + count][kv_heads][head_dim]. Contiguous, 16-aligned.
struct AllRows {
  void *k = nullptr, *v = nullptr;
};

class BlockPlanes {
 public:
  // By geometry alone. UNIMPLEMENTED BLOCK_PLAN: another plan, or options that the ops do not take.
  static Result<BlockPlanesForm> FormOf(const Plan& plan, const Geometry& geometry);
  // The bytes that Bind takes on the current GPU; strides are not looked at. Errors as Make.
  static Result<int64_t> WorkspaceBytes(const Plan& plan, const BlockPlanesShape& shape,
                                        const cuda::CudaOps& ops);

  // INVALID_ARGUMENT BLOCK_SHAPE, with the field and its value. `ops` outlives it.
  static Result<std::unique_ptr<BlockPlanes>> Make(const Plan& plan, const BlockPlanesShape& shape,
                                                   const cuda::CudaOps& ops);

  int64_t workspace_bytes() const { return workspace_.bytes(); }
  // layers: where each layer's first block lies, a multiple of 32. workspace: device memory, all
  // zero. INVALID_ARGUMENT BLOCK_LAYERS, BLOCK_WORKSPACE.
  Status Bind(std::span<const uint64_t> layers, void* workspace);
  // layers: where the lower runs of each layer's first block lie, a multiple of 32. Those of others
  // follow, kUnit * kv_heads * lower_token_bytes each. INVALID_ARGUMENT BLOCK_LAYERS, also where
  // lower runs are in blocks.
  Status BindLower(std::span<const uint64_t> layers);

  // FAILED_PRECONDITION BLOCK_UNBOUND before Bind and, with lower = "host", BindLower; here and
  // below. INVALID_ARGUMENT BLOCK_ROWS:
  // more rows than there may be.
  Status Begin(const BlockPlanesBatch& batch, cuda::Stream stream);

  // The first `rows` rows: their keys and values join their slots, their queries attend; out
  // [rows][query_heads][head_dim], contiguous. Groups that are full now are sealed behind it, with
  // the last layer at the latest. INVALID_ARGUMENT BLOCK_LAYERS, BLOCK_QUERIES.
  Status Decode(int32_t layer, const DecodedRows& step, void* out, int32_t rows,
                cuda::Stream stream);

  // Gathers all rows of the sequence, for the engine's own attention, and seals what is full.
  // A block that another row of the step fills is sealed by that row's call: that comes first.
  // Errors as Decode; BLOCK_ROWS: a row that is not of a prompt, or too many tokens.
  Status Prompt(int32_t layer, const PromptChunk& chunk, const AllRows& all, cuda::Stream stream);

 private:
  BlockPlanes(const Plan& plan, const BlockPlanesShape& shape, const cuda::CudaOps& ops);

  // Layers that are sealed at once.
  struct LayerRange {
    int32_t first = 0, count = 1;
  };
  enum class Side : uint8_t { kKeys, kValues };

  Status CheckLayer(int32_t layer) const;
  Status CheckRows(const char* what, const TokenRows& rows, int32_t heads) const;
  // Slots of the step's rows from `row` on.
  cuda::PagedLayer SlotPages(int32_t layer, int32_t row) const;
  cuda::DeviceRows SlotRows(int32_t layer, int32_t row, Side side) const;
  cuda::DevicePlanes PlanesOf(int32_t layer, const RunTables& blocks, int32_t stride) const;
  cuda::Partials RawPartial() const;
  Status AttendRawRows(int32_t layer, const DecodedRows& step, int32_t rows,
                       cuda::Stream stream) const;
  Status AttendSealed(int32_t layer, const TokenRows& q, void* out, int32_t rows,
                      cuda::Stream stream) const;
  Status SealSlots(LayerRange layers, int32_t rows, cuda::Stream stream) const;
  Status SealChunk(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                   cuda::Stream stream) const;
  Status KeepTail(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                  cuda::Stream stream) const;

  const Plan plan_;
  const BlockPlanesShape shape_;
  const cuda::CudaOps& ops_;
  const PlanesFormat format_;
  BlockWorkspace workspace_;
  BlockPlanesStep step_;
  BlockWorkspace::Piece<uint64_t> no_distance_;  // 0, as a table of one page
  BlockWorkspace::Piece<float> raw_m_, raw_l_, raw_o_;
  BlockWorkspace::Piece<uint32_t> planes_counters_;
  BlockWorkspace::Piece<std::byte> raw_scratch_, planes_scratch_, rows_of_slots_;
  std::vector<uint64_t> layers_, lower_layers_;  // the latter with lower = "host"
  bool is_even_ = false;                         // layers lie at one distance, lower runs, too
};

}  // namespace kvstrata
