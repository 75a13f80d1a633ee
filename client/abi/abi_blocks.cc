// SPDX-License-Identifier: Apache-2.0
// The C ABI's attention over an engine's own blocks (include/kvstrata/block_attention.h), as abi.cc
// has the rest. It needs no daemon, so it is the same for both transports.
#include <cstddef>
#include <memory>
#include <utility>

#include "client/abi/abi_call.h"
#include "client/include/kvstrata/block_attention.h"
#include "kernels/blocks/block_attention.h"
#include "kernels/cuda/cuda_library.h"

namespace kvstrata::client {
namespace {

Result<BlockShape> ReadShape(const kvs_block_shape* caller) {
  KVS_RETURN_IF_ERROR(NotNull("shape", caller));
  KVS_ASSIGN_OR_RETURN(const kvs_block_shape from,
                       Grown("kvs_block_shape", caller, sizeof(kvs_block_shape)));
  BlockShape shape;
  KVS_ASSIGN_OR_RETURN(shape.geometry, ReadBlockGeometry(from));
  shape.block_tokens = from.block_tokens;
  shape.block_stride = from.block_stride;
  shape.head_stride = from.head_stride;
  shape.slot_stride = from.slot_stride;
  shape.value_offset = from.value_offset;
  shape.index_offset = from.index_offset;
  shape.max_rows = from.max_rows;
  shape.max_decodes = from.max_decodes;
  shape.max_tokens = from.max_tokens;
  return shape;
}

}  // namespace
}  // namespace kvstrata::client

using namespace kvstrata;          // NOLINT: this file is the boundary
using namespace kvstrata::client;  // NOLINT

int kvs_block_attention_index_bytes(const char* plan, const kvs_block_shape* shape,
                                    int64_t* bytes) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("bytes", bytes));
    KVS_ASSIGN_OR_RETURN(const Plan read, ReadBlockPlan(plan));
    KVS_ASSIGN_OR_RETURN(const BlockShape of, ReadShape(shape));
    KVS_ASSIGN_OR_RETURN(*bytes, BlockAttention::IndexBytes(read, of));
    return OkStatus();
  });
}

int kvs_block_attention_open(const char* plan, const kvs_block_shape* shape,
                             kvs_block_attention** out, kvs_block_needs* needs) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(NotNull("needs", needs));
    KVS_RETURN_IF_ERROR(StructSize("kvs_block_needs", needs, needs->size, sizeof(*needs)));
    KVS_ASSIGN_OR_RETURN(const Plan read, ReadBlockPlan(plan));
    KVS_ASSIGN_OR_RETURN(const BlockShape of, ReadShape(shape));
    KVS_ASSIGN_OR_RETURN(const cuda::CudaOps* ops, cuda::LoadCudaOps());
    KVS_ASSIGN_OR_RETURN(std::unique_ptr<BlockAttention> made,
                         BlockAttention::Make(read, of, *ops));
    needs->workspace_bytes = static_cast<uint64_t>(made->workspace_bytes());
    needs->unit_tokens = made->unit_tokens();
    needs->min_tokens = made->min_tokens();
    *out = AddBlocks(std::move(made));
    return OkStatus();
  });
}

int kvs_block_attention_bind(kvs_block_attention* attention, const uint64_t* layers, size_t n,
                             void* workspace) {
  return WithBlocks("attention", attention, [&](BlockAttention& a) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("layers", layers, n, kMaxLayers));
    return a.Bind({layers, n}, workspace);
  });
}

int kvs_block_attention_begin(kvs_block_attention* attention, const kvs_block_batch* batch,
                              void* stream) {
  return WithBlocks("attention", attention, [&](BlockAttention& a) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("batch", batch));
    KVS_ASSIGN_OR_RETURN(const kvs_block_batch from,
                         Grown("kvs_block_batch", batch, offsetof(kvs_block_batch, sampled)));
    if (from.rows > 0) {
      KVS_RETURN_IF_ERROR(NotNull("blocks", from.blocks));
      KVS_RETURN_IF_ERROR(NotNull("tokens", from.tokens));
      KVS_RETURN_IF_ERROR(NotNull("query_starts", from.query_starts));
    }
    return a.Begin({from.blocks, from.blocks_of_row, from.tokens, from.query_starts, from.in_full,
                    from.rows, from.new_tokens, from.sampled - 1},
                   stream);
  });
}

int kvs_block_attention_attend(kvs_block_attention* attention, int32_t layer, const void* q,
                               int64_t q_stride, void* out, int32_t rows, void* stream) {
  return WithBlocks("attention", attention, [&](BlockAttention& a) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("q", q));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    return a.Attend(layer, {q, q_stride}, out, rows, stream);
  });
}

int kvs_block_attention_audit(kvs_block_attention* attention, int32_t layer, float* outputs,
                              float* lse, void* stream) {
  return WithBlocks("attention", attention, [&](BlockAttention& a) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("outputs", outputs));
    KVS_RETURN_IF_ERROR(NotNull("lse", lse));
    return a.Audit(layer, {outputs, lse}, stream);
  });
}

int kvs_block_attention_index(kvs_block_attention* attention, const int32_t* blocks, size_t n,
                              void* stream) {
  return WithBlocks("attention", attention, [&](BlockAttention& a) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("blocks", blocks, n, kMaxTokens));
    return a.Index(blocks, static_cast<int32_t>(n), stream);
  });
}

void kvs_block_attention_close(kvs_block_attention* attention) { EndBlocks(attention); }
