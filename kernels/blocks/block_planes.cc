// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_planes.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/cuda/device_buffer.h"
#include "kernels/step/break_even.h"

namespace kvstrata {
namespace {

constexpr int32_t kUnit = 64;      // tokens of a group, of a block and of a slot
constexpr int32_t kMostGroup = 8;  // query heads a KV head
constexpr int32_t kMostRows = 65535;
constexpr int64_t kAlignment = 32;  // of runs

Status Unserved(const std::string& what) {
  return Unimplemented("BLOCK_PLAN", what +
                                         " is not served over an engine's own blocks; planes is, "
                                         "with unit = 64, without share and run, for head_dim 64 "
                                         "and 128 and up to 8 query heads a KV head");
}

Status Serves(const Plan& plan, const Geometry& g) {
  const auto& o = plan.planes;
  if (plan.codec != CodecKind::kPlanes) return Unserved("plan \"" + plan.name + "\"");
  if (o.share > 0) return Unserved("share = " + std::to_string(o.share));
  if (o.run > 1) return Unserved("run = " + std::to_string(o.run));
  if (o.unit != kUnit) return Unserved("unit = " + std::to_string(o.unit));
  if (g.head_dim > 128) return Unserved("head_dim = " + std::to_string(g.head_dim));
  if (g.group() > kMostGroup) {
    return Unserved(std::to_string(g.group()) + " query heads a KV head");
  }
  return OkStatus();
}

Geometry InSlots(Geometry geometry) {
  geometry.page_tokens = kUnit;
  return geometry;
}

PlanesFormat FormatOf(const Plan& plan, const Geometry& g) {
  return {g.head_dim, kUnit, plan.planes.keep};
}

Status Wrong(std::string_view field, int64_t value, const std::string& wanted) {
  return InvalidArgument("BLOCK_SHAPE", std::string(field) + " = " + std::to_string(value) +
                                            ", and has to be " + wanted);
}

Status CheckLimits(const Plan& plan, const BlockPlanesShape& s) {
  KVS_RETURN_IF_ERROR(Validate(InSlots(s.geometry)));
  KVS_RETURN_IF_ERROR(Serves(plan, s.geometry));
  if (s.geometry.dtype == DType::kF32) {
    return InvalidArgument("BLOCK_SHAPE", "dtype = f32, and has to be bf16 or f16");
  }
  if (s.slots < 1 || s.slots > kMostRows) return Wrong("slots", s.slots, "1 to 65535");
  if (s.max_rows < 1 || s.max_rows > kMostRows) return Wrong("max_rows", s.max_rows, "1 to 65535");
  if (s.max_tokens < 1 || s.max_tokens > kMostMinTokens) {
    return Wrong("max_tokens", s.max_tokens, "1 to 2^29");
  }
  return OkStatus();
}

int32_t BlocksOfRow(const BlockPlanesShape& s) { return (s.max_tokens + kUnit - 1) / kUnit; }

PlanesRule RuleOf(const Plan& plan, int32_t layer) {
  const auto& o = plan.planes;
  PlanesRule rule{0, o.fine_above, o.skip_below, 1, o.sample, o.sinks, o.recent};
  if (layer < plan.n_dense_layers) rule.recent = kMostMinTokens;  // all of it
  return rule;
}

}  // namespace

Result<BlockPlanesForm> BlockPlanes::FormOf(const Plan& plan, const Geometry& geometry) {
  const Geometry g = InSlots(geometry);
  KVS_RETURN_IF_ERROR(Validate(g));
  KVS_RETURN_IF_ERROR(Serves(plan, g));
  const PlanesFormat format = FormatOf(plan, g);
  return BlockPlanesForm{(format.upper_bytes() + format.lower_bytes()) / kUnit, g.page_bytes()};
}

Result<int64_t> BlockPlanes::WorkspaceBytes(const Plan& plan, const BlockPlanesShape& shape,
                                            const cuda::CudaOps& ops) {
  KVS_RETURN_IF_ERROR(CheckLimits(plan, shape));
  return BlockPlanes(plan, shape, ops).workspace_bytes();
}

Result<std::unique_ptr<BlockPlanes>> BlockPlanes::Make(const Plan& plan,
                                                       const BlockPlanesShape& shape,
                                                       const cuda::CudaOps& ops) {
  KVS_RETURN_IF_ERROR(CheckLimits(plan, shape));
  KVS_ASSIGN_OR_RETURN(const BlockPlanesForm form, FormOf(plan, shape.geometry));
  const int64_t least = form.token_bytes * kUnit * shape.geometry.kv_heads;
  if (shape.block_stride < least || shape.block_stride % kAlignment != 0) {
    return Wrong("block_stride", shape.block_stride,
                 "a multiple of 32 bytes, at least " + std::to_string(least));
  }
  const Plan numbered = WithMinTokens(plan, shape.geometry, StepsOn::kGpu);
  return std::unique_ptr<BlockPlanes>(new BlockPlanes(numbered, shape, ops));
}

BlockPlanes::BlockPlanes(const Plan& plan, const BlockPlanesShape& shape, const cuda::CudaOps& ops)
    : plan_(plan), shape_(shape), ops_(ops), format_(FormatOf(plan, shape.geometry)) {
  const Geometry& g = shape.geometry;
  const int64_t rows = shape.max_rows, queries = rows * g.query_heads;
  blocks_ = workspace_.Add<uint64_t>(rows * BlocksOfRow(shape));
  for (auto* piece : {&slots_, &seal_blocks_}) *piece = workspace_.Add<uint64_t>(rows);
  no_distance_ = workspace_.Add<uint64_t>(1);
  for (auto* piece :
       {&lengths_, &chosen_, &from_, &to_, &tokens_, &raw_, &groups_, &seal_from_, &seal_to_}) {
    *piece = workspace_.Add<int32_t>(rows);
  }
  tails_ = workspace_.Add<int32_t>(2 * rows);
  full_ = workspace_.Add<uint8_t>(rows);
  for (auto* piece : {&raw_m_, &raw_l_}) *piece = workspace_.Add<float>(queries);
  raw_o_ = workspace_.Add<float>(queries * g.head_dim);
  raw_scratch_ = workspace_.Add<std::byte>(ops.attend_raw_workspace_bytes(g.group(), g.head_dim));
  cuda::AttendPlanesBatch sealed;
  sealed.planes.format = format_;
  sealed.planes.kv_heads = g.kv_heads;
  sealed.batch = shape.max_rows;
  sealed.group = g.group();
  planes_scratch_ = workspace_.Add<std::byte>(ops.attend_planes_workspace_bytes(sealed));
  rows_of_slots_ = workspace_.Add<std::byte>(g.layers * SlotLayerBytes());
}

Status BlockPlanes::Bind(std::span<const uint64_t> layers, void* workspace) {
  if (layers.size() != static_cast<size_t>(shape_.geometry.layers)) {
    return InvalidArgument("BLOCK_LAYERS", "there are " + std::to_string(layers.size()) +
                                               " layers' addresses, and the shape has " +
                                               std::to_string(shape_.geometry.layers) + " layers");
  }
  for (const uint64_t layer : layers) {
    if (layer == 0 || layer % kAlignment != 0) {
      return InvalidArgument("BLOCK_LAYERS",
                             "a layer lies at " + std::to_string(layer) + ", no multiple of 32");
    }
  }
  if (workspace == nullptr) return InvalidArgument("BLOCK_WORKSPACE", "workspace is null");
  layers_.assign(layers.begin(), layers.end());
  is_even_ = int64_t{shape_.max_rows} * shape_.geometry.layers <= kMostRows;
  for (size_t i = 2; i < layers_.size(); ++i) {
    is_even_ &= layers_[i] - layers_[i - 1] == layers_[1] - layers_[0];
  }
  workspace_.Give(workspace);
  last_rows_ = last_decodes_ = 0;
  return OkStatus();
}

Status BlockPlanes::CheckLayer(int32_t layer) const {
  if (!workspace_.is_given()) {
    return FailedPrecondition("BLOCK_UNBOUND", "no layers are bound; bind them first");
  }
  if (layer >= 0 && layer < shape_.geometry.layers) return OkStatus();
  return InvalidArgument("BLOCK_LAYERS", "layer " + std::to_string(layer) + " of " +
                                             std::to_string(shape_.geometry.layers));
}

Status BlockPlanes::CheckRows(const char* what, const TokenRows& rows, int32_t heads) const {
  const int64_t least = heads * shape_.geometry.row_bytes();
  const auto at = reinterpret_cast<uintptr_t>(rows.data);
  if (at != 0 && at % 16 == 0 && rows.stride % 16 == 0 && rows.stride >= least) return OkStatus();
  return InvalidArgument("BLOCK_QUERIES",
                         std::string(what) + " lies at " + std::to_string(at) + " with " +
                             std::to_string(rows.stride) +
                             " bytes from row to row; give multiples of 16, and at least " +
                             std::to_string(least) + " bytes a row");
}

int64_t BlockPlanes::SlotLayerBytes() const {
  return shape_.slots * PageLayout::Of(InSlots(shape_.geometry)).layer_stride;
}

int64_t BlockPlanes::SlotsOf(int32_t layer) const {
  return reinterpret_cast<int64_t>(workspace_.At(rows_of_slots_)) + layer * SlotLayerBytes();
}

cuda::PagedLayer BlockPlanes::SlotPages(int32_t layer, int32_t row) const {
  const PageLayout page = PageLayout::Of(InSlots(shape_.geometry));
  cuda::PagedLayer slots;
  slots.pages = workspace_.At(slots_) + row;
  slots.page_stride = 1;
  slots.page_tokens = kUnit;
  slots.kv_heads = page.kv_heads;
  slots.head_dim = page.head_dim;
  slots.dtype = page.dtype;
  slots.key_offset = SlotsOf(layer);
  slots.value_offset = slots.key_offset + page.value_offset;
  slots.head_stride = page.head_stride;
  slots.slot_stride = page.slot_stride;
  return slots;
}

cuda::DeviceRows BlockPlanes::SlotRows(int32_t layer, int32_t row, Side side) const {
  const cuda::PagedLayer slots = SlotPages(layer, row);
  cuda::DeviceRows rows = KeyRows(slots);
  if (side == Side::kValues) rows.offset = slots.value_offset;
  return rows;
}

cuda::DevicePlanes BlockPlanes::PlanesOf(int32_t layer, const uint64_t* blocks,
                                         int32_t stride) const {
  const auto at = static_cast<int64_t>(layers_[static_cast<size_t>(layer)]);
  cuda::DevicePlanes planes;
  planes.format = format_;
  planes.kv_heads = shape_.geometry.kv_heads;
  planes.upper = {blocks, at, format_.upper_bytes()};
  planes.lower = {blocks, at + planes.kv_heads * format_.upper_bytes(), format_.lower_bytes()};
  planes.block_stride = stride;
  planes.block_groups = 1;
  return planes;
}

const uint64_t* BlockPlanes::BlocksFrom(int32_t row) const {
  return workspace_.At(blocks_) + int64_t{row} * BlocksOfRow(shape_);
}

Status BlockPlanes::Begin(const BlockPlanesBatch& batch, cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckLayer(0));
  if (batch.rows < 0 || batch.rows > shape_.max_rows || batch.decodes < 0 ||
      batch.decodes > batch.rows) {
    return InvalidArgument("BLOCK_ROWS", std::to_string(batch.decodes) + " rows that decode of " +
                                             std::to_string(batch.rows) + ", and max_rows is " +
                                             std::to_string(shape_.max_rows));
  }
  cuda::BlockPagesBatch pages;
  pages.blocks = batch.blocks;
  pages.blocks_of_row = batch.blocks_of_row;
  pages.tokens = batch.tokens;
  pages.query_starts = batch.query_starts;
  pages.rows = batch.rows;
  pages.capacity = std::max(batch.rows, std::exchange(last_rows_, batch.rows));
  pages.block_tokens = kUnit;
  pages.block_stride = shape_.block_stride;
  pages.pages = workspace_.At(blocks_);
  pages.page_stride = BlocksOfRow(shape_);
  pages.lengths = workspace_.At(lengths_);
  pages.chosen = workspace_.At(chosen_);
  pages.from = workspace_.At(from_);
  pages.to = workspace_.At(to_);
  KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.block_pages(pages, stream), "op block_pages"));
  cuda::BlockSlotsBatch w;
  w.pages = pages.pages;
  w.page_stride = pages.page_stride;
  w.lengths = pages.lengths;
  w.slot_ids = batch.slots;
  w.in_full = batch.in_full;
  w.rows = batch.rows;
  w.decodes = last_decodes_ = batch.decodes;
  w.capacity = pages.capacity;
  w.unit = kUnit;
  w.min_tokens = plan_.min_tokens;
  w.slot_bytes = SlotLayerBytes() / shape_.slots;
  w.slots = workspace_.At(slots_);
  w.seal_blocks = workspace_.At(seal_blocks_);
  w.tokens = workspace_.At(tokens_);
  w.raw = workspace_.At(raw_);
  w.groups = workspace_.At(groups_);
  w.seal_from = workspace_.At(seal_from_);
  w.seal_to = workspace_.At(seal_to_);
  w.tails = workspace_.At(tails_);
  w.full = workspace_.At(full_);
  return CudaStatus(ops_, ops_.block_slots(w, stream), "op block_slots");
}

cuda::Partials BlockPlanes::RawPartial() const {
  return {workspace_.At(raw_m_), workspace_.At(raw_l_), workspace_.At(raw_o_), 1};
}

// The new rows join their slots in it.
Status BlockPlanes::AttendRawRows(int32_t layer, const DecodedRows& step, int32_t rows,
                                  cuda::Stream stream) const {
  const Geometry& g = shape_.geometry;
  cuda::AttendRawBatch w;
  w.layer = SlotPages(layer, 0);
  w.batch = rows;
  w.group = g.group();
  w.tokens = workspace_.At(raw_);
  w.q = step.q.data;
  w.q_stride = step.q.stride;
  w.scale = g.logit_scale();
  w.new_k = {step.k.data, step.k.stride, g.row_bytes(), g.dtype};
  w.new_v = {step.v.data, step.v.stride, g.row_bytes(), g.dtype};
  w.partial = RawPartial();
  w.workspace = workspace_.At(raw_scratch_);
  return CudaStatus(ops_, ops_.attend_raw(w, stream), "op attend_raw");
}

Status BlockPlanes::AttendSealed(int32_t layer, const TokenRows& q, void* out, int32_t rows,
                                 cuda::Stream stream) const {
  const Geometry& g = shape_.geometry;
  cuda::AttendPlanesBatch w;
  w.planes = PlanesOf(layer, BlocksFrom(0), BlocksOfRow(shape_));
  w.rule = RuleOf(plan_, layer);
  w.batch = rows;
  w.group = g.group();
  w.tokens = workspace_.At(tokens_);
  w.groups = workspace_.At(groups_);
  w.in_full = workspace_.At(full_);
  w.q = q.data;
  w.q_dtype = g.dtype;
  w.q_stride = q.stride / SizeOf(g.dtype);
  w.scale = g.logit_scale();
  w.with = RawPartial();
  w.to = {out, g.dtype, nullptr};
  w.workspace = workspace_.At(planes_scratch_);
  return CudaStatus(ops_, ops_.attend_planes(w, stream), "op attend_planes");
}

// Each slot is a sequence of one group, whose block has a table of its own.
Status BlockPlanes::SealSlots(LayerRange layers, int32_t rows, cuda::Stream stream) const {
  cuda::PackPlanesBatch w;
  w.keys = SlotRows(layers.first, 0, Side::kKeys);
  w.values = SlotRows(layers.first, 0, Side::kValues);
  w.planes = PlanesOf(layers.first, workspace_.At(seal_blocks_), 1);
  w.from = workspace_.At(seal_from_);
  w.to = workspace_.At(seal_to_);
  w.batch = rows;
  w.groups_max = 1;
  w.layers = layers.count;
  if (layers.count > 1) {
    w.row_layer_stride = SlotLayerBytes();
    w.upper_layer_stride = w.lower_layer_stride = static_cast<int64_t>(layers_[1] - layers_[0]);
  }
  return CudaStatus(ops_, ops_.pack_planes(w, stream), "op pack_planes");
}

// All layers are sealed at once where they can be; a prompt of the same step may read a block that
// a decoding row fills, so that with prompts none waits for the last layer.
Status BlockPlanes::Decode(int32_t layer, const DecodedRows& step, void* out, int32_t rows,
                           cuda::Stream stream) {
  const Geometry& g = shape_.geometry;
  KVS_RETURN_IF_ERROR(CheckLayer(layer));
  if (rows < 0 || rows > shape_.max_rows) {
    return InvalidArgument("BLOCK_ROWS", std::to_string(rows) + " rows, and max_rows is " +
                                             std::to_string(shape_.max_rows));
  }
  KVS_RETURN_IF_ERROR(CheckRows("q", step.q, g.query_heads));
  KVS_RETURN_IF_ERROR(CheckRows("k", step.k, g.kv_heads));
  KVS_RETURN_IF_ERROR(CheckRows("v", step.v, g.kv_heads));
  KVS_RETURN_IF_ERROR(AttendRawRows(layer, step, rows, stream));
  KVS_RETURN_IF_ERROR(AttendSealed(layer, step.q, out, rows, stream));
  if (!is_even_ || last_rows_ > last_decodes_) return SealSlots({layer, 1}, rows, stream);
  return layer + 1 < g.layers ? OkStatus() : SealSlots({0, g.layers}, rows, stream);
}

Status BlockPlanes::Prompt(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                           cuda::Stream stream) {
  const Geometry& g = shape_.geometry;
  KVS_RETURN_IF_ERROR(CheckLayer(layer));
  if (chunk.row < last_decodes_ || chunk.row >= last_rows_ || chunk.before < 0 || chunk.count < 1 ||
      chunk.before > shape_.max_tokens - chunk.count) {
    return InvalidArgument(
        "BLOCK_ROWS", "row " + std::to_string(chunk.row) + " with " + std::to_string(chunk.before) +
                          " and " + std::to_string(chunk.count) + " tokens; rows of prompts are " +
                          std::to_string(last_decodes_) + " to " + std::to_string(last_rows_) +
                          ", max_tokens is " + std::to_string(shape_.max_tokens));
  }
  KVS_RETURN_IF_ERROR(CheckRows("k", chunk.k, g.kv_heads));
  KVS_RETURN_IF_ERROR(CheckRows("v", chunk.v, g.kv_heads));
  const int64_t row = g.kv_heads * g.row_bytes();
  KVS_RETURN_IF_ERROR(CheckRows("all_k", {all.k, row}, g.kv_heads));
  KVS_RETURN_IF_ERROR(CheckRows("all_v", {all.v, row}, g.kv_heads));
  cuda::WidenPlanesBatch w;
  w.planes = PlanesOf(layer, BlocksFrom(chunk.row), BlocksOfRow(shape_));
  w.groups = chunk.before / kUnit;
  w.raw_keys = SlotRows(layer, chunk.row, Side::kKeys);
  w.raw_values = SlotRows(layer, chunk.row, Side::kValues);
  w.raw = chunk.before % kUnit;
  w.new_k = {chunk.k.data, chunk.k.stride, g.row_bytes(), g.dtype};
  w.new_v = {chunk.v.data, chunk.v.stride, g.row_bytes(), g.dtype};
  w.added = chunk.count;
  w.dtype = g.dtype;
  w.keys = all.k;
  w.values = all.v;
  KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.widen_planes(w, stream), "op widen_planes"));
  KVS_RETURN_IF_ERROR(SealChunk(layer, chunk, all, stream));
  return KeepTail(layer, chunk, all, stream);
}

// Groups that the chunk completes, from rows that lie side by side: a page at no distance.
Status BlockPlanes::SealChunk(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                              cuda::Stream stream) const {
  const Geometry& g = shape_.geometry;
  cuda::PackPlanesBatch w;
  w.groups_max = (chunk.before + chunk.count) / kUnit - chunk.before / kUnit;
  if (w.groups_max == 0) return OkStatus();
  w.keys = {workspace_.At(no_distance_),
            1,
            BlocksOfRow(shape_) * kUnit,
            g.kv_heads,
            g.head_dim,
            g.dtype,
            reinterpret_cast<int64_t>(all.k),
            g.row_bytes(),
            g.kv_heads * g.row_bytes()};
  w.values = w.keys;
  w.values.offset = reinterpret_cast<int64_t>(all.v);
  w.planes = PlanesOf(layer, BlocksFrom(chunk.row), BlocksOfRow(shape_));
  w.from = workspace_.At(from_) + chunk.row;
  w.to = workspace_.At(to_) + chunk.row;
  w.batch = 1;
  return CudaStatus(ops_, ops_.pack_planes(w, stream), "op pack_planes");
}

// What no group is full with goes to the slot.
Status BlockPlanes::KeepTail(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                             cuda::Stream stream) const {
  const Geometry& g = shape_.geometry;
  cuda::AppendBatch w;
  w.rows_max = (chunk.before + chunk.count) % kUnit;
  if (w.rows_max == 0) return OkStatus();
  const int64_t row = g.kv_heads * g.row_bytes();
  const int64_t first = chunk.before + chunk.count - w.rows_max;
  w.layer = SlotPages(layer, chunk.row);
  w.batch = 1;
  w.starts = workspace_.At(tails_) + int64_t{2} * chunk.row;
  w.tokens = w.starts + 1;
  w.k = cuda::DeviceSource{all.k, row, g.row_bytes(), g.dtype}.From(first);
  w.v = cuda::DeviceSource{all.v, row, g.row_bytes(), g.dtype}.From(first);
  return CudaStatus(ops_, ops_.append(w, stream), "op append");
}

}  // namespace kvstrata
