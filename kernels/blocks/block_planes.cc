// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_planes.h"

#include <string>
#include <string_view>

#include "kernels/cuda/device_buffer.h"
#include "kernels/step/break_even.h"

namespace kvstrata {
namespace {

constexpr int32_t kUnit = BlockPlanesShape::kUnit;
constexpr int32_t kMostGroup = 8;  // query heads a KV head
constexpr int32_t kMostRows = 65535;
constexpr int64_t kAlignment = 32;  // what runs lie at

Status Unserved(const std::string& what) {
  return Unimplemented("BLOCK_PLAN", what +
                                         " is not served over an engine's own blocks; strata is, "
                                         "with unit = 64, without share and run, for head_dim 64 "
                                         "and 128 and up to 8 query heads a KV head");
}

Status Serves(const Plan& plan, const Geometry& g) {
  const auto& fine = plan.fine;
  const auto& planes = plan.planes;
  if (plan.codec != CodecKind::kPlanes) return Unserved("plan \"" + plan.name + "\"");
  if (fine.share > 0) return Unserved("share = " + std::to_string(fine.share));
  if (fine.run > 1) return Unserved("run = " + std::to_string(fine.run));
  if (planes.unit != kUnit) return Unserved("unit = " + std::to_string(planes.unit));
  if (g.head_dim > 128) return Unserved("head_dim = " + std::to_string(g.head_dim));
  if (g.group() > kMostGroup) {
    return Unserved(std::to_string(g.group()) + " query heads a KV head");
  }
  return OkStatus();
}

PlanesFormat FormatOf(const Plan& plan, const Geometry& g) {
  return {g.head_dim, kUnit, plan.planes.keep};
}

// Copies of a group's lower rows in blocks, with their tags; 0: there are none.
int64_t RecordBytes(const Plan& plan, const PlanesFormat& format) {
  const bool are_there = plan.planes.lower == Tier::kHost && plan.planes.hot > 0;
  return are_there ? cuda::DevicePlanes::HotRecordBytes(plan.planes.hot, format.row_bytes()) : 0;
}

// From a block's lower runs to the next one's; 0: they are in blocks.
int64_t LowerStride(const Plan& plan, const Geometry& g) {
  return plan.planes.lower == Tier::kHost ? g.kv_heads * FormatOf(plan, g).lower_bytes() : 0;
}

bool AreAtOneDistance(std::span<const uint64_t> layers) {
  for (size_t i = 2; i < layers.size(); ++i) {
    if (layers[i] - layers[i - 1] != layers[1] - layers[0]) return false;
  }
  return true;
}

// Whether one launch seals groups of all layers.
bool AreEven(const BlockPlanesShape& shape, std::span<const uint64_t> layers,
             std::span<const uint64_t> lower_layers) {
  return int64_t{shape.max_rows} * shape.geometry.layers <= kMostRows && AreAtOneDistance(layers) &&
         AreAtOneDistance(lower_layers);
}

Status CheckAddresses(const BlockPlanesShape& shape, std::span<const uint64_t> layers) {
  if (layers.size() != static_cast<size_t>(shape.geometry.layers)) {
    return InvalidArgument("BLOCK_LAYERS", "there are " + std::to_string(layers.size()) +
                                               " layers' addresses, and the shape has " +
                                               std::to_string(shape.geometry.layers) + " layers");
  }
  for (const uint64_t layer : layers) {
    if (layer == 0 || layer % kAlignment != 0) {
      return InvalidArgument("BLOCK_LAYERS",
                             "a layer lies at " + std::to_string(layer) + ", no multiple of 32");
    }
  }
  return OkStatus();
}

Status Wrong(std::string_view field, int64_t value, const std::string& wanted) {
  return InvalidArgument("BLOCK_SHAPE", std::string(field) + " = " + std::to_string(value) +
                                            ", and has to be " + wanted);
}

Status CheckLimits(const Plan& plan, const BlockPlanesShape& s) {
  KVS_RETURN_IF_ERROR(Validate(s.geometry));
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

PlanesRule RuleOf(const Plan& plan, int32_t layer) {
  const auto& o = plan.fine;
  if (layer < plan.n_dense_layers) return kAllFine;
  return {0, o.fine_above, o.skip_below, 1, o.sample, o.sinks, o.recent};
}

}  // namespace

Result<BlockPlanesForm> BlockPlanes::FormOf(const Plan& plan, const Geometry& geometry) {
  KVS_RETURN_IF_ERROR(Validate(geometry));
  KVS_RETURN_IF_ERROR(Serves(plan, geometry));
  const PlanesFormat format = FormatOf(plan, geometry);
  BlockPlanesShape shape;
  shape.geometry = geometry;
  shape.slots = 1;
  const bool is_apart = plan.planes.lower == Tier::kHost;
  const int64_t upper = format.upper_bytes() / kUnit, lower = format.lower_bytes() / kUnit;
  return BlockPlanesForm{upper + (is_apart ? RecordBytes(plan, format) / kUnit : lower),
                         geometry.layers * shape.SlotLayerBytes(), is_apart ? lower : 0};
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
    : plan_(plan),
      shape_(shape),
      ops_(ops),
      format_(FormatOf(plan, shape.geometry)),
      step_(shape, LowerStride(plan, shape.geometry), ops, &workspace_) {
  const Geometry& g = shape.geometry;
  const int64_t queries = int64_t{shape.max_rows} * g.query_heads;
  no_distance_ = workspace_.Add<uint64_t>(1);
  for (auto* piece : {&raw_m_, &raw_l_}) *piece = workspace_.Add<float>(queries);
  raw_o_ = workspace_.Add<float>(queries * g.head_dim);
  raw_scratch_ = workspace_.Add<std::byte>(ops.attend_raw_workspace_bytes(g.group(), g.head_dim));
  cuda::AttendPlanesBatch sealed;
  sealed.planes.format = format_;
  sealed.planes.kv_heads = g.kv_heads;
  sealed.rule = kAllFine;  // no plan that is served needs more memory
  sealed.batch = shape.max_rows;
  sealed.group = g.group();
  planes_counters_ = workspace_.Add<uint32_t>(int64_t{shape.max_rows} * g.kv_heads);
  planes_scratch_ = workspace_.Add<std::byte>(ops.attend_planes_workspace_bytes(sealed));
  rows_of_slots_ = workspace_.Add<std::byte>(g.layers * shape.SlotLayerBytes());
}

Status BlockPlanes::Bind(std::span<const uint64_t> layers, void* workspace) {
  KVS_RETURN_IF_ERROR(CheckAddresses(shape_, layers));
  if (workspace == nullptr) return InvalidArgument("BLOCK_WORKSPACE", "workspace is null");
  layers_.assign(layers.begin(), layers.end());
  workspace_.Give(workspace);
  step_.Forget();
  is_even_ = AreEven(shape_, layers_, lower_layers_);
  return OkStatus();
}

Status BlockPlanes::BindLower(std::span<const uint64_t> layers) {
  if (!step_.is_lower_apart()) {
    return InvalidArgument("BLOCK_LAYERS", "lower runs of plan \"" + plan_.name +
                                               "\" are in its blocks; bind none, or take "
                                               "lower = \"host\"");
  }
  KVS_RETURN_IF_ERROR(CheckAddresses(shape_, layers));
  lower_layers_.assign(layers.begin(), layers.end());
  is_even_ = AreEven(shape_, layers_, lower_layers_);
  return OkStatus();
}

Status BlockPlanes::CheckLayer(int32_t layer) const {
  if (!workspace_.is_given()) {
    return FailedPrecondition("BLOCK_UNBOUND", "no layers are bound; bind them first");
  }
  if (step_.is_lower_apart() && lower_layers_.empty()) {
    return FailedPrecondition("BLOCK_UNBOUND",
                              "no lower runs are bound, which lie on the host under lower = "
                              "\"host\"; bind them first (kvs_block_planes_bind_lower)");
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

cuda::PagedLayer BlockPlanes::SlotPages(int32_t layer, int32_t row) const {
  const PageLayout page = shape_.SlotLayout();
  cuda::PagedLayer slots;
  slots.pages = step_.From(row).slots;
  slots.page_stride = 1;
  slots.page_tokens = kUnit;
  slots.kv_heads = page.kv_heads;
  slots.head_dim = page.head_dim;
  slots.dtype = page.dtype;
  slots.key_offset =
      reinterpret_cast<int64_t>(workspace_.At(rows_of_slots_)) + layer * shape_.SlotLayerBytes();
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

cuda::DevicePlanes BlockPlanes::PlanesOf(int32_t layer, const RunTables& blocks,
                                         int32_t stride) const {
  const auto i = static_cast<size_t>(layer);
  const auto upper = static_cast<int64_t>(layers_[i]);
  const int64_t behind_upper = upper + shape_.geometry.kv_heads * format_.upper_bytes();
  const int64_t lower =
      step_.is_lower_apart() ? static_cast<int64_t>(lower_layers_[i]) : behind_upper;
  cuda::DevicePlanes planes;
  planes.format = format_;
  planes.kv_heads = shape_.geometry.kv_heads;
  planes.upper = {blocks.upper, upper, format_.upper_bytes()};
  planes.lower = {blocks.lower, lower, format_.lower_bytes()};
  planes.block_stride = stride;
  planes.block_groups = 1;
  planes.hot_head_stride = RecordBytes(plan_, format_);
  if (planes.hot_head_stride > 0) planes.hot_offset = behind_upper;
  return planes;
}

Status BlockPlanes::Begin(const BlockPlanesBatch& batch, cuda::Stream stream) {
  KVS_RETURN_IF_ERROR(CheckLayer(0));
  return step_.Write(batch, plan_.min_tokens, stream);
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
  w.tokens = step_.From(0).raw;
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
  const PlanesTables step = step_.From(0);
  w.planes = PlanesOf(layer, step.blocks, shape_.BlocksOfRow());
  w.rule = RuleOf(plan_, layer);
  w.batch = rows;
  w.group = g.group();
  w.tokens = step.tokens;
  w.groups = step.groups;
  w.ahead = true;  // all but the partial was complete when op attend_raw, right before, went on
  w.q = q.data;
  w.q_dtype = g.dtype;
  w.q_stride = q.stride / SizeOf(g.dtype);
  w.scale = g.logit_scale();
  if (w.planes.hot_offset != 0) {
    w.hot.rows = plan_.planes.hot;
    w.hot.launch = step.step;
  }
  w.with = RawPartial();
  w.to = {out, g.dtype, nullptr};
  w.counters = workspace_.At(planes_counters_);
  w.workspace = workspace_.At(planes_scratch_);
  return CudaStatus(ops_, ops_.attend_planes(w, stream), "op attend_planes");
}

// Each slot is a sequence of one group, whose block has a table of its own.
Status BlockPlanes::SealSlots(LayerRange layers, int32_t rows, cuda::Stream stream) const {
  const PlanesTables step = step_.From(0);
  cuda::PackPlanesBatch w;
  w.keys = SlotRows(layers.first, 0, Side::kKeys);
  w.values = SlotRows(layers.first, 0, Side::kValues);
  w.planes = PlanesOf(layers.first, step.seal_blocks, 1);
  w.from = step.seal_from;
  w.to = step.seal_to;
  w.batch = rows;
  w.groups_max = 1;
  w.layers = layers.count;
  if (layers.count > 1) {
    w.row_layer_stride = shape_.SlotLayerBytes();
    const std::vector<uint64_t>& lower = step_.is_lower_apart() ? lower_layers_ : layers_;
    w.upper_layer_stride = static_cast<int64_t>(layers_[1] - layers_[0]);
    w.lower_layer_stride = static_cast<int64_t>(lower[1] - lower[0]);
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
  if (!is_even_ || step_.has_prompts()) return SealSlots({layer, 1}, rows, stream);
  return layer + 1 < g.layers ? OkStatus() : SealSlots({0, g.layers}, rows, stream);
}

Status BlockPlanes::Prompt(int32_t layer, const PromptChunk& chunk, const AllRows& all,
                           cuda::Stream stream) {
  const Geometry& g = shape_.geometry;
  KVS_RETURN_IF_ERROR(CheckLayer(layer));
  if (!step_.IsPrompt(chunk.row) || chunk.before < 0 || chunk.count < 1 ||
      chunk.before > shape_.max_tokens - chunk.count) {
    return InvalidArgument(
        "BLOCK_ROWS", "row " + std::to_string(chunk.row) + " with " + std::to_string(chunk.before) +
                          " and " + std::to_string(chunk.count) +
                          " tokens; give a row of the step that does not decode, and at most " +
                          std::to_string(shape_.max_tokens) + " tokens");
  }
  KVS_RETURN_IF_ERROR(CheckRows("k", chunk.k, g.kv_heads));
  KVS_RETURN_IF_ERROR(CheckRows("v", chunk.v, g.kv_heads));
  const int64_t row = g.kv_heads * g.row_bytes();
  KVS_RETURN_IF_ERROR(CheckRows("all_k", {all.k, row}, g.kv_heads));
  KVS_RETURN_IF_ERROR(CheckRows("all_v", {all.v, row}, g.kv_heads));
  cuda::WidenPlanesBatch w;
  w.planes = PlanesOf(layer, step_.From(chunk.row).blocks, shape_.BlocksOfRow());
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
            shape_.BlocksOfRow() * kUnit,
            g.kv_heads,
            g.head_dim,
            g.dtype,
            reinterpret_cast<int64_t>(all.k),
            g.row_bytes(),
            g.kv_heads * g.row_bytes()};
  w.values = w.keys;
  w.values.offset = reinterpret_cast<int64_t>(all.v);
  w.planes = PlanesOf(layer, step_.From(chunk.row).blocks, shape_.BlocksOfRow());
  w.from = step_.From(chunk.row).from;
  w.to = step_.From(chunk.row).to;
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
  w.starts = step_.From(chunk.row).tails;
  w.tokens = w.starts + 1;
  w.k = cuda::DeviceSource{all.k, row, g.row_bytes(), g.dtype}.From(first);
  w.v = cuda::DeviceSource{all.v, row, g.row_bytes(), g.dtype}.From(first);
  return CudaStatus(ops_, ops_.append(w, stream), "op append");
}

}  // namespace kvstrata
