// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_attention.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/cuda/device_buffer.h"
#include "kernels/select/selection_rule.h"
#include "kernels/step/break_even.h"
#include "kernels/step/gpu/frame/cuda_serves.h"

namespace kvstrata {
namespace {

Status Unserved(const Plan& plan, std::string_view why) {
  return Unimplemented("BLOCK_PLAN",
                       "plan \"" + plan.name + "\" " + std::string(why) +
                           "; over an engine's own blocks served are full, window, quest, bits "
                           "and tokenselect; the others are for transformers and SGLang, whose "
                           "sequences the daemon keeps");
}

Status ServesPlan(const Plan& plan) {
  switch (plan.selector) {
    case SelectorKind::kFull:
    case SelectorKind::kWindow:
    case SelectorKind::kMinMax:
    case SelectorKind::kVote:
    case SelectorKind::kBits:
      break;
    default:
      return Unserved(plan, "needs a state by sequence");
  }
  if (plan.codec != CodecKind::kRaw) return Unserved(plan, "keeps other rows than the engine's");
  if (plan.compact) return Unserved(plan, "has compact = true, for keys before rotary embedding");
  if (plan.selector == SelectorKind::kBits && plan.bits.max_missed > 0) {
    return Unserved(plan, "has max_missed, whose lists differ in length by query");
  }
  return OkStatus();
}

// The rule by which op block_pages says what is attended whatever a query is.
cuda::CandidateRule WindowOf(const Plan& plan) {
  return {1, plan.window.sinks, plan.window.recent, 0, plan.min_tokens};
}

std::unique_ptr<BlockSelector> SelectorOf(const BlockSelectorSource& source) {
  switch (source.plan.selector) {
    case SelectorKind::kMinMax:
      return NewBlockMinMax(source);
    case SelectorKind::kBits:
      return NewBlockBits(source);
    case SelectorKind::kVote:
      return NewBlockVote(source);
    default:
      return nullptr;
  }
}

// What a row's queries take.
int64_t QueryBytes(const Geometry& g) { return g.query_heads * g.row_bytes(); }

Status CheckLayer(const Geometry& g, int32_t layer) {
  if (layer >= 0 && layer < g.layers) return OkStatus();
  return InvalidArgument("BLOCK_LAYERS",
                         "layer " + std::to_string(layer) + " of " + std::to_string(g.layers));
}

Status CheckQueries(const Geometry& g, const BlockQueries& q) {
  const int64_t least = QueryBytes(g);
  if (reinterpret_cast<uintptr_t>(q.data) % 16 == 0 && q.stride % 16 == 0 && q.stride >= least) {
    return OkStatus();
  }
  return InvalidArgument("BLOCK_QUERIES",
                         "q lies at " + std::to_string(reinterpret_cast<uintptr_t>(q.data)) +
                             " with " + std::to_string(q.stride) +
                             " bytes from row to row; give multiples of 16, and at least " +
                             std::to_string(least) + " bytes a row");
}

}  // namespace

Result<int64_t> BlockAttention::IndexBytes(const Plan& plan, const BlockShape& shape) {
  KVS_RETURN_IF_ERROR(ServesPlan(plan));
  KVS_ASSIGN_OR_RETURN(const BlockIndex index, BlockIndex::Of(plan, shape));
  return index.block_bytes();
}

Result<std::unique_ptr<BlockAttention>> BlockAttention::Make(const Plan& plan,
                                                             const BlockShape& shape,
                                                             const cuda::CudaOps& ops) {
  KVS_RETURN_IF_ERROR(ServesPlan(plan));
  KVS_RETURN_IF_ERROR(CheckBlockShape(shape));
  KVS_RETURN_IF_ERROR(CudaServes(plan, shape.geometry));
  KVS_ASSIGN_OR_RETURN(BlockIndex index, BlockIndex::Of(plan, shape));
  const Plan numbered = WithMinTokens(plan, shape.geometry, StepsOn::kGpu);
  return std::unique_ptr<BlockAttention>(new BlockAttention(numbered, shape, ops, index));
}

BlockAttention::BlockAttention(const Plan& plan, const BlockShape& shape, const cuda::CudaOps& ops,
                               BlockIndex index)
    : plan_(plan), shape_(shape), ops_(ops), index_(index) {
  const int64_t rows = shape.max_rows;
  pages_ = workspace_.Add<uint64_t>(rows * shape.BlocksOfRow());
  for (auto* piece : {&lengths_, &chosen_, &from_, &to_}) *piece = workspace_.Add<int32_t>(rows);
  if (plan.selector == SelectorKind::kWindow) {
    for (auto* piece : {&sink_end_, &recent_begin_}) *piece = workspace_.Add<int32_t>(rows);
  }
  sampled_row_ = workspace_.Add<int32_t>(1);
  kept_ = workspace_.Add<std::byte>(shape.geometry.layers * QueryBytes(shape.geometry));
  attend_scratch_ = workspace_.Add<std::byte>(
      ops.attend_raw_workspace_bytes(shape.geometry.group(), shape.geometry.head_dim));
  selector_ = SelectorOf({plan_, shape_, ops_, &workspace_});
}

Status BlockAttention::Bind(std::span<const uint64_t> layers, void* workspace) {
  if (layers.size() != static_cast<size_t>(shape_.geometry.layers)) {
    return InvalidArgument("BLOCK_LAYERS", "there are " + std::to_string(layers.size()) +
                                               " layers' addresses, and the shape has " +
                                               std::to_string(shape_.geometry.layers) + " layers");
  }
  for (const uint64_t layer : layers) {
    if (layer == 0 || layer % 16 != 0) {
      return InvalidArgument("BLOCK_LAYERS",
                             "a layer lies at " + std::to_string(layer) + ", no multiple of 16");
    }
  }
  if (workspace == nullptr) return InvalidArgument("BLOCK_WORKSPACE", "workspace is null");
  layers_.assign(layers.begin(), layers.end());
  workspace_.Give(workspace);
  pending_rows_ = pending_units_ = last_rows_ = 0;
  sampled_ = -1;
  return OkStatus();
}

Status BlockAttention::CheckRows(std::string_view limit, int32_t rows, int32_t most) const {
  if (!workspace_.is_given()) {
    return FailedPrecondition("BLOCK_UNBOUND", "no layers are bound; bind them first");
  }
  if (rows >= 0 && rows <= most) return OkStatus();
  return InvalidArgument("BLOCK_ROWS", std::to_string(rows) + " rows, and " + std::string(limit) +
                                           " is " + std::to_string(most));
}

BlockTables BlockAttention::TablesFrom(int32_t row) const {
  const int32_t stride = shape_.BlocksOfRow();
  return {workspace_.At(pages_) + int64_t{row} * stride, stride, workspace_.At(from_) + row,
          workspace_.At(to_) + row};
}

// The op for so many rows; those that the tables had beyond them are emptied.
cuda::BlockPagesBatch BlockAttention::PagesOf(int32_t rows) {
  cuda::BlockPagesBatch w;
  w.rows = rows;
  w.capacity = std::max(rows, std::exchange(last_rows_, rows));
  w.block_tokens = shape_.block_tokens;
  w.block_stride = shape_.block_stride;
  w.pages = workspace_.At(pages_);
  w.page_stride = shape_.BlocksOfRow();
  w.lengths = workspace_.At(lengths_);
  w.chosen = workspace_.At(chosen_);
  w.from = workspace_.At(from_);
  w.to = workspace_.At(to_);
  w.sampled = sampled_;
  w.sampled_row = workspace_.At(sampled_row_);
  if (plan_.selector == SelectorKind::kWindow) {
    w.window = WindowOf(plan_);
    w.sink_end = workspace_.At(sink_end_);
    w.recent_begin = workspace_.At(recent_begin_);
  }
  return w;
}

// The tables still are the last step's: what that completed is written first.
Status BlockAttention::Begin(const BlockBatch& batch, cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckRows("max_rows", batch.rows, shape_.max_rows));
  if (batch.sampled >= std::min(batch.rows, shape_.max_decodes)) {
    return InvalidArgument("BLOCK_ROWS", "sampled = " + std::to_string(batch.sampled) +
                                             ", and the step has " + std::to_string(batch.rows) +
                                             " rows; -1 samples none");
  }
  KVS_RETURN_IF_ERROR(
      index_.Write(ops_, layers_, TablesFrom(0), pending_rows_, pending_units_, stream));
  pending_rows_ = 0;
  sampled_ = batch.sampled;
  cuda::BlockPagesBatch w = PagesOf(batch.rows);
  w.blocks = batch.blocks;
  w.blocks_of_row = batch.blocks_of_row;
  w.tokens = batch.tokens;
  w.query_starts = batch.query_starts;
  w.in_full = batch.in_full;
  KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.block_pages(w, stream), "op block_pages"));
  pending_rows_ = batch.rows;
  pending_units_ = index_.unit() == 0 || batch.new_tokens <= 0
                       ? 0
                       : (batch.new_tokens + index_.unit() - 1) / index_.unit();
  return OkStatus();
}

bool BlockAttention::Chooses(int32_t layer) const {
  return selector_ != nullptr && layer >= plan_.n_dense_layers;
}

Result<cuda::DeviceSelection> BlockAttention::Select(int32_t layer, RowRange rows,
                                                     const BlockQueries& q,
                                                     cuda::Stream stream) const {
  if (Chooses(layer)) {
    const int64_t elements = q.stride / static_cast<int64_t>(SizeOf(shape_.geometry.dtype));
    KVS_RETURN_IF_ERROR(selector_->Select(
        {TablesFrom(rows.first), &index_, &workspace_, layers_[static_cast<size_t>(layer)],
         workspace_.At(chosen_) + rows.first, q.data, elements, rows.count, stream}));
    return selector_->SelectionOf(workspace_);
  }
  cuda::DeviceSelection all;
  if (plan_.selector != SelectorKind::kWindow || layer < plan_.n_dense_layers) return all;
  all.sink_end = workspace_.At(sink_end_) + rows.first;
  all.recent_begin = workspace_.At(recent_begin_) + rows.first;
  return all;
}

cuda::AttendRawBatch BlockAttention::AttendOf(int32_t layer, RowRange rows,
                                              const BlockQueries& q) const {
  const Geometry& g = shape_.geometry;
  const BlockTables tables = TablesFrom(rows.first);
  cuda::AttendRawBatch w;
  w.layer.pages = tables.pages;
  w.layer.page_stride = tables.stride;
  w.layer.page_tokens = shape_.block_tokens;
  w.layer.kv_heads = g.kv_heads;
  w.layer.head_dim = g.head_dim;
  w.layer.dtype = g.dtype;
  w.layer.key_offset = static_cast<int64_t>(layers_[static_cast<size_t>(layer)]);
  w.layer.value_offset = w.layer.key_offset + shape_.value_offset;
  w.layer.head_stride = shape_.head_stride;
  w.layer.slot_stride = shape_.slot_stride;
  w.batch = rows.count;
  w.group = g.group();
  w.tokens = workspace_.At(lengths_) + rows.first;
  w.q = q.data;
  w.q_stride = q.stride;
  w.scale = g.logit_scale();
  w.workspace = workspace_.At(attend_scratch_);
  return w;
}

std::byte* BlockAttention::KeptOf(int32_t layer) const {
  return workspace_.At(kept_) + layer * QueryBytes(shape_.geometry);
}

Status BlockAttention::Attend(int32_t layer, const BlockQueries& q, void* out, int32_t rows,
                              cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckRows("max_decodes", rows, shape_.max_decodes));
  KVS_RETURN_IF_ERROR(CheckLayer(shape_.geometry, layer));
  KVS_RETURN_IF_ERROR(CheckQueries(shape_.geometry, q));
  cuda::AttendRawBatch w = AttendOf(layer, {0, rows}, q);
  KVS_ASSIGN_OR_RETURN(w.selection, Select(layer, {0, rows}, q, stream));
  w.to = {out, shape_.geometry.dtype, nullptr};
  w.kept = {workspace_.At(sampled_row_), KeptOf(layer)};
  return CudaStatus(ops_, ops_.attend_raw(w, stream), "op attend_raw");
}

// The step's tables and lengths are still there, and of the index what it chose by.
Status BlockAttention::Audit(int32_t layer, const BlockAuditOutput& out, cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckRows("max_rows", 0, shape_.max_rows));
  KVS_RETURN_IF_ERROR(CheckLayer(shape_.geometry, layer));
  if (sampled_ < 0) {
    return FailedPrecondition("BLOCK_SAMPLE",
                              "no row of the last step was sampled; name one in begin, "
                              "and audit before the next call of begin or index");
  }
  const Geometry& g = shape_.geometry;
  const BlockQueries q{KeptOf(layer), QueryBytes(g)};
  cuda::AttendRawBatch w = AttendOf(layer, {sampled_, 1}, q);
  KVS_ASSIGN_OR_RETURN(w.selection, Select(layer, {sampled_, 1}, q, stream));
  w.to = {out.rows, DType::kF32, out.lse};
  KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.attend_raw(w, stream), "op attend_raw"));
  w.selection = {};
  w.to = {out.rows + int64_t{g.query_heads} * g.head_dim, DType::kF32, out.lse + g.query_heads};
  return CudaStatus(ops_, ops_.attend_raw(w, stream), "op attend_raw");
}

// Each block is a sequence of one block, all of whose tokens are new. The tables are a step's, so
// what the last one completed is written first.
Status BlockAttention::Index(const int32_t* blocks, int32_t count, cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckRows("max_rows", 0, shape_.max_rows));
  KVS_RETURN_IF_ERROR(
      index_.Write(ops_, layers_, TablesFrom(0), pending_rows_, pending_units_, stream));
  pending_rows_ = 0;
  sampled_ = -1;
  if (index_.unit() == 0) return OkStatus();
  for (int32_t first = 0; first < count; first += shape_.max_rows) {
    cuda::BlockPagesBatch w = PagesOf(std::min(count - first, shape_.max_rows));
    w.blocks = blocks + first;
    w.blocks_of_row = 1;
    w.page_stride = 1;
    KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.block_pages(w, stream), "op block_pages"));
    BlockTables tables = TablesFrom(0);
    tables.stride = 1;
    KVS_RETURN_IF_ERROR(
        index_.Write(ops_, layers_, tables, w.rows, shape_.block_tokens / index_.unit(), stream));
  }
  return OkStatus();
}

}  // namespace kvstrata
