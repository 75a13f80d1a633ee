// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_planes_step.h"

#include <algorithm>
#include <span>
#include <string>

#include "kernels/cuda/device_buffer.h"

namespace kvstrata {

PageLayout BlockPlanesShape::SlotLayout() const {
  Geometry in_slots = geometry;
  in_slots.page_tokens = kUnit;
  return PageLayout::Of(in_slots);
}

BlockPlanesStep::BlockPlanesStep(const BlockPlanesShape& shape, int64_t lower_stride,
                                 const cuda::CudaOps& ops, BlockWorkspace* workspace)
    : shape_(shape), lower_stride_(lower_stride), ops_(ops), workspace_(*workspace) {
  const int64_t rows = shape.max_rows;
  blocks_ = workspace->Add<uint64_t>(rows * shape.BlocksOfRow());
  for (auto* piece : {&slots_, &seal_blocks_}) *piece = workspace->Add<uint64_t>(rows);
  for (auto* piece :
       {&lengths_, &chosen_, &from_, &to_, &tokens_, &raw_, &groups_, &seal_from_, &seal_to_}) {
    *piece = workspace->Add<int32_t>(rows);
  }
  tails_ = workspace->Add<int32_t>(2 * rows);
  lower_blocks_ = blocks_;
  lower_seal_blocks_ = seal_blocks_;
  if (!is_lower_apart()) return;
  lower_blocks_ = workspace->Add<uint64_t>(rows * shape.BlocksOfRow());
  lower_seal_blocks_ = workspace->Add<uint64_t>(rows);
}

PlanesTables BlockPlanesStep::From(int32_t row) const {
  const int64_t first = int64_t{row} * shape_.BlocksOfRow();
  PlanesTables tables;
  tables.blocks = {workspace_.At(blocks_) + first, workspace_.At(lower_blocks_) + first};
  tables.seal_blocks = {workspace_.At(seal_blocks_) + row, workspace_.At(lower_seal_blocks_) + row};
  tables.slots = workspace_.At(slots_) + row;
  tables.from = workspace_.At(from_) + row;
  tables.to = workspace_.At(to_) + row;
  tables.tokens = workspace_.At(tokens_) + row;
  tables.raw = workspace_.At(raw_) + row;
  tables.groups = workspace_.At(groups_) + row;
  tables.seal_from = workspace_.At(seal_from_) + row;
  tables.seal_to = workspace_.At(seal_to_) + row;
  tables.tails = workspace_.At(tails_) + int64_t{2} * row;
  return tables;
}

Status BlockPlanesStep::WritePages(const BlockPlanesBatch& batch, const Blocks& blocks,
                                   int32_t capacity, cuda::Stream stream) const {
  cuda::BlockPagesBatch w;
  w.blocks = batch.blocks;
  w.blocks_of_row = batch.blocks_of_row;
  w.tokens = batch.tokens;
  w.query_starts = batch.query_starts;
  w.rows = batch.rows;
  w.capacity = capacity;
  w.block_tokens = BlockPlanesShape::kUnit;
  w.block_stride = blocks.stride;
  w.pages = blocks.table;
  w.page_stride = shape_.BlocksOfRow();
  w.lengths = workspace_.At(lengths_);
  w.chosen = workspace_.At(chosen_);
  w.from = workspace_.At(from_);
  w.to = workspace_.At(to_);
  return CudaStatus(ops_, ops_.block_pages(w, stream), "op block_pages");
}

Status BlockPlanesStep::WriteSlots(const BlockPlanesBatch& batch, const Blocks& blocks,
                                   int32_t capacity, int32_t min_tokens,
                                   cuda::Stream stream) const {
  const PlanesTables tables = From(0);
  cuda::BlockSlotsBatch w;
  w.pages = blocks.table;
  w.page_stride = shape_.BlocksOfRow();
  w.lengths = workspace_.At(lengths_);
  w.slot_ids = batch.slots;
  w.in_full = batch.in_full;
  w.rows = batch.rows;
  w.decodes = batch.decodes;
  w.capacity = capacity;
  w.unit = BlockPlanesShape::kUnit;
  w.min_tokens = min_tokens;
  w.slot_bytes = shape_.SlotLayout().layer_stride;
  w.slots = tables.slots;
  w.seal_blocks = blocks.seal;
  w.tokens = tables.tokens;
  w.raw = tables.raw;
  w.groups = tables.groups;
  w.seal_from = tables.seal_from;
  w.seal_to = tables.seal_to;
  w.tails = tables.tails;
  return CudaStatus(ops_, ops_.block_slots(w, stream), "op block_slots");
}

// Rows that the tables had beyond the batch's are emptied. Where lower runs lie apart, both ops run
// once more for their tables, and write all else again as it is.
Status BlockPlanesStep::Write(const BlockPlanesBatch& batch, int32_t min_tokens,
                              cuda::Stream stream) {
  if (batch.rows < 0 || batch.rows > shape_.max_rows || batch.decodes < 0 ||
      batch.decodes > batch.rows) {
    return InvalidArgument("BLOCK_ROWS",
                           std::to_string(batch.rows) + " rows, " + std::to_string(batch.decodes) +
                               " of which decode; max_rows is " + std::to_string(shape_.max_rows));
  }
  const int32_t capacity = std::max(batch.rows, rows_);
  const PlanesTables tables = From(0);
  const Blocks both[] = {{shape_.block_stride, tables.blocks.upper, tables.seal_blocks.upper},
                         {lower_stride_, tables.blocks.lower, tables.seal_blocks.lower}};
  for (const Blocks& blocks : std::span(both).first(is_lower_apart() ? 2 : 1)) {
    KVS_RETURN_IF_ERROR(WritePages(batch, blocks, capacity, stream));
    KVS_RETURN_IF_ERROR(WriteSlots(batch, blocks, capacity, min_tokens, stream));
  }
  rows_ = batch.rows;
  decodes_ = batch.decodes;
  return OkStatus();
}

}  // namespace kvstrata
