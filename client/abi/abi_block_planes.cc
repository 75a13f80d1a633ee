// SPDX-License-Identifier: Apache-2.0
// The C ABI's plan strata over an engine's own blocks (include/kvstrata/block_planes.h), as abi.cc
// has the rest. It needs no daemon, so it is the same for both transports.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "client/abi/abi_call.h"
#include "client/include/kvstrata/block_planes.h"
#include "kernels/blocks/block_planes.h"
#include "kernels/cuda/cuda_library.h"

namespace kvstrata::client {
namespace {

constexpr int32_t kBlockTokens = 64;

Result<BlockPlanesShape> ReadShape(const kvs_planes_shape* caller) {
  KVS_RETURN_IF_ERROR(NotNull("shape", caller));
  KVS_ASSIGN_OR_RETURN(const kvs_planes_shape from,
                       Grown("kvs_planes_shape", caller, sizeof(kvs_planes_shape)));
  BlockPlanesShape shape;
  KVS_ASSIGN_OR_RETURN(shape.geometry, ReadBlockGeometry(from));
  if (from.block_tokens != kBlockTokens) {
    return InvalidArgument("BLOCK_SHAPE", "block_tokens = " + std::to_string(from.block_tokens) +
                                              ", and has to be 64, the plan's unit");
  }
  shape.block_stride = from.block_stride;
  shape.slots = from.slots;
  shape.max_rows = from.max_rows;
  shape.max_tokens = from.max_tokens;
  return shape;
}

// 0 where there is no GPU, and where it is not asked for: then CUDA is not even looked for, as a
// process that forks later must not.
Result<uint64_t> WorkspaceBytes(const Plan& plan, const BlockPlanesShape& shape) {
  if (shape.slots == 0 && shape.max_rows == 0 && shape.max_tokens == 0) return uint64_t{0};
  const Result<const cuda::CudaOps*> ops = cuda::LoadCudaOps();
  if (!ops.ok()) return uint64_t{0};
  KVS_ASSIGN_OR_RETURN(const int64_t bytes, BlockPlanes::WorkspaceBytes(plan, shape, *ops.value()));
  return static_cast<uint64_t>(bytes);
}

TokenRows RowsOf(const kvs_planes_rows& rows) { return {rows.data, rows.stride}; }

}  // namespace
}  // namespace kvstrata::client

using namespace kvstrata;          // NOLINT: this file is the boundary
using namespace kvstrata::client;  // NOLINT

int kvs_block_planes_form(const char* plan, const kvs_planes_shape* shape, kvs_planes_form* form) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("form", form));
    constexpr size_t kFirst = offsetof(kvs_planes_form, lower_token_bytes);
    KVS_ASSIGN_OR_RETURN(kvs_planes_form filled, Grown("kvs_planes_form", form, kFirst));
    KVS_ASSIGN_OR_RETURN(const Plan read, ReadBlockPlan(plan));
    KVS_ASSIGN_OR_RETURN(const BlockPlanesShape of, ReadShape(shape));
    KVS_ASSIGN_OR_RETURN(const BlockPlanesForm made, BlockPlanes::FormOf(read, of.geometry));
    KVS_ASSIGN_OR_RETURN(filled.workspace_bytes, WorkspaceBytes(read, of));
    filled.token_bytes = made.token_bytes;
    filled.slot_bytes = static_cast<uint64_t>(made.slot_bytes);
    filled.lower_token_bytes = made.lower_token_bytes;
    std::memcpy(form, &filled, std::min(filled.size, sizeof(filled)));
    return OkStatus();
  });
}

int kvs_block_planes_open(const char* plan, const kvs_planes_shape* shape, kvs_block_planes** out) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const Plan read, ReadBlockPlan(plan));
    KVS_ASSIGN_OR_RETURN(const BlockPlanesShape of, ReadShape(shape));
    KVS_ASSIGN_OR_RETURN(const cuda::CudaOps* ops, cuda::LoadCudaOps());
    KVS_ASSIGN_OR_RETURN(std::unique_ptr<BlockPlanes> made, BlockPlanes::Make(read, of, *ops));
    *out = AddBlocks(std::move(made));
    return OkStatus();
  });
}

int kvs_block_planes_bind(kvs_block_planes* planes, const uint64_t* layers, size_t n,
                          void* workspace) {
  return WithBlocks("planes", planes, [&](BlockPlanes& p) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("layers", layers, n, kMaxLayers));
    return p.Bind({layers, n}, workspace);
  });
}

int kvs_block_planes_bind_lower(kvs_block_planes* planes, const uint64_t* layers, size_t n) {
  return WithBlocks("planes", planes, [&](BlockPlanes& p) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("layers", layers, n, kMaxLayers));
    return p.BindLower({layers, n});
  });
}

int kvs_block_planes_begin(kvs_block_planes* planes, const kvs_planes_batch* batch, void* stream) {
  return WithBlocks("planes", planes, [&](BlockPlanes& p) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("batch", batch));
    KVS_ASSIGN_OR_RETURN(const kvs_planes_batch from,
                         Grown("kvs_planes_batch", batch, sizeof(kvs_planes_batch)));
    if (from.rows > 0) {
      KVS_RETURN_IF_ERROR(NotNull("blocks", from.blocks));
      KVS_RETURN_IF_ERROR(NotNull("tokens", from.tokens));
      KVS_RETURN_IF_ERROR(NotNull("query_starts", from.query_starts));
      KVS_RETURN_IF_ERROR(NotNull("slots", from.slots));
    }
    return p.Begin({from.blocks, from.blocks_of_row, from.tokens, from.query_starts, from.slots,
                    from.in_full, from.rows, from.decodes},
                   stream);
  });
}

int kvs_block_planes_decode(kvs_block_planes* planes, int32_t layer, kvs_planes_rows q,
                            kvs_planes_rows k, kvs_planes_rows v, void* out, int32_t rows,
                            void* stream) {
  return WithBlocks("planes", planes, [&](BlockPlanes& p) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    return p.Decode(layer, {RowsOf(q), RowsOf(k), RowsOf(v)}, out, rows, stream);
  });
}

int kvs_block_planes_prompt(kvs_block_planes* planes, int32_t layer, int32_t row, int32_t before,
                            int32_t count, kvs_planes_rows k, kvs_planes_rows v, void* all_k,
                            void* all_v, void* stream) {
  return WithBlocks("planes", planes, [&](BlockPlanes& p) -> Status {
    return p.Prompt(layer, {row, before, count, RowsOf(k), RowsOf(v)}, {all_k, all_v}, stream);
  });
}

void kvs_block_planes_close(kvs_block_planes* planes) { EndBlocks(planes); }
