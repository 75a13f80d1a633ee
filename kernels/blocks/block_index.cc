// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_index.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/device_buffer.h"

namespace kvstrata {
namespace {

constexpr int64_t kAlignment = 256;  // the L2 fetches a row of so many bytes whole

IndexLayout::Kind KindOf(const Plan& plan) {
  switch (plan.selector) {
    case SelectorKind::kMinMax:
      return plan.minmax.deviation ? IndexLayout::Kind::kDeviation : IndexLayout::Kind::kMinMax;
    case SelectorKind::kBits:
      return IndexLayout::Kind::kBits;
    default:
      return IndexLayout::Kind::kNone;
  }
}

}  // namespace

Result<BlockIndex> BlockIndex::Of(const Plan& plan, const BlockShape& shape) {
  BlockIndex index(plan, shape);
  if (index.unit() != 0 && shape.block_tokens % index.unit_ != 0) {
    return InvalidArgument("BLOCK_TOKENS", "a block has " + std::to_string(shape.block_tokens) +
                                               " tokens, no multiple of the plan's unit of " +
                                               std::to_string(index.unit_) +
                                               "; give blocks of a multiple of it");
  }
  return index;
}

BlockIndex::BlockIndex(const Plan& plan, const BlockShape& shape)
    : shape_(shape), kind_(KindOf(plan)), unit_(plan.index.unit), bits_(plan.bits.bits) {
  if (kind_ == IndexLayout::Kind::kNone) return;
  const int64_t unit_bytes = kind_ == IndexLayout::Kind::kBits
                                 ? QuantisedGroup{shape.geometry.head_dim, bits_, unit_}.bytes()
                                 : 2 * shape.geometry.row_bytes();
  bytes_ = unit_bytes * units() * shape.geometry.kv_heads;
  bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
}

Status BlockIndex::Write(const cuda::CudaOps& ops, std::span<const uint64_t> layers,
                         const BlockTables& tables, int32_t rows, int32_t most,
                         cuda::Stream stream) const {
  if (unit() == 0 || rows == 0 || most == 0 || layers.empty()) return OkStatus();
  constexpr int32_t kMostLaunched = 65535;  // layers of rows
  const int64_t stride = layers.size() < 2 ? 0 : static_cast<int64_t>(layers[1] - layers[0]);
  bool alike = stride % 16 == 0 && rows <= kMostLaunched / static_cast<int32_t>(layers.size());
  for (size_t i = 1; i < layers.size(); ++i) {
    alike &= static_cast<int64_t>(layers[i] - layers[i - 1]) == stride;
  }
  if (alike) {
    return WriteLayers(ops, layers[0], static_cast<int32_t>(layers.size()), stride, tables, rows,
                       most, stream);
  }
  for (const uint64_t layer : layers) {
    KVS_RETURN_IF_ERROR(WriteLayers(ops, layer, 1, 0, tables, rows, most, stream));
  }
  return OkStatus();
}

Status BlockIndex::WriteLayers(const cuda::CudaOps& ops, uint64_t first, int32_t layers,
                               int64_t stride, const BlockTables& tables, int32_t rows,
                               int32_t most, cuda::Stream stream) const {
  if (kind_ == IndexLayout::Kind::kBits) {
    cuda::QuantiseKeysBatch w;
    w.keys = KeysOf(tables, first);
    w.groups = GroupsOf(tables, first);
    w.from = tables.from;
    w.to = tables.to;
    w.batch = rows;
    w.groups_max = most;
    w.layers = layers;
    w.key_layer_stride = w.group_layer_stride = stride;
    return CudaStatus(ops, ops.quantise_keys(w, stream), "op quantise_keys");
  }
  cuda::SummarizeBatch w;
  using Kind = cuda::SummarizeBatch::Kind;
  w.kind = kind_ == IndexLayout::Kind::kDeviation ? Kind::kDeviation : Kind::kMinMax;
  w.source = KeysOf(tables, first);
  w.summary = RowsOf(tables, first);
  w.field_stride = field_stride();
  w.unit_rows = unit_;
  w.from = tables.from;
  w.to = tables.to;
  w.batch = rows;
  w.units_max = most;
  w.layers = layers;
  w.source_layer_stride = w.summary_layer_stride = stride;
  return CudaStatus(ops, ops.summarize(w, stream), "op summarize");
}

int64_t BlockIndex::field_stride() const {
  return units() * shape_.geometry.kv_heads * shape_.geometry.row_bytes();
}

cuda::DeviceRows BlockIndex::RowsOf(const BlockTables& tables, uint64_t layer) const {
  const Geometry& g = shape_.geometry;
  return {.pages = tables.pages,
          .page_stride = tables.stride,
          .page_rows = units(),
          .kv_heads = g.kv_heads,
          .head_dim = g.head_dim,
          .dtype = g.dtype,
          .offset = static_cast<int64_t>(layer) + shape_.index_offset,
          .head_stride = units() * g.row_bytes(),
          .row_stride = g.row_bytes()};
}

cuda::DeviceGroups BlockIndex::GroupsOf(const BlockTables& tables, uint64_t layer) const {
  const QuantisedGroup format{shape_.geometry.head_dim, bits_, unit_};
  return {.blocks = tables.pages,
          .block_stride = tables.stride,
          .block_groups = units(),
          .kv_heads = shape_.geometry.kv_heads,
          .format = format,
          .offset = static_cast<int64_t>(layer) + shape_.index_offset,
          .head_stride = units() * format.bytes()};
}

cuda::DeviceRows BlockIndex::KeysOf(const BlockTables& tables, uint64_t layer) const {
  const Geometry& g = shape_.geometry;
  return {.pages = tables.pages,
          .page_stride = tables.stride,
          .page_rows = shape_.block_tokens,
          .kv_heads = g.kv_heads,
          .head_dim = g.head_dim,
          .dtype = g.dtype,
          .offset = static_cast<int64_t>(layer),
          .head_stride = shape_.head_stride,
          .row_stride = shape_.slot_stride};
}

}  // namespace kvstrata
