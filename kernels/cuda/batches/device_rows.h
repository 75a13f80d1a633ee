// SPDX-License-Identifier: Apache-2.0
// Rows of one layer of a batch, wherever they lie: keys on pages, or summaries in index blocks.
// A POD of device addresses; no CUDA header.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/batch.h"
#include "kernels/pages/page_view.h"

namespace kvstrata::cuda {

// Row r of KV head h of sequence b lies at
//   pages[b * page_stride + r / page_rows] + offset + h * head_stride + (r % page_rows) *
//   row_stride.
struct DeviceRows {
  const uint64_t* pages = nullptr;  // device [batch][page_stride], addresses of pages or blocks
  int32_t page_stride = 0;
  int32_t page_rows = 0;  // rows a page holds of one head
  int32_t kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBF16;
  int64_t offset = 0, head_stride = 0, row_stride = 0;  // bytes, multiples of 16
};

// The keys of a layer, one row a token.
inline DeviceRows KeyRows(const PagedLayer& layer) {
  return {layer.pages, layer.page_stride, layer.page_tokens, layer.kv_heads,   layer.head_dim,
          layer.dtype, layer.key_offset,  layer.head_stride, layer.slot_stride};
}

// One field of one level of an index, one row a unit. blocks: device [batch][block_stride].
inline DeviceRows IndexRows(const uint64_t* blocks, int32_t block_stride, const IndexLayout& index,
                            int level, int layer, int field) {
  DeviceRows rows;
  rows.pages = blocks;
  rows.page_stride = block_stride;
  rows.page_rows = index.levels[level].units_per_block;
  rows.kv_heads = index.kv_heads;
  rows.head_dim = index.head_dim;
  rows.dtype = index.dtype;
  rows.offset = index.RowOffset(level, layer, field, 0, 0);
  rows.row_stride = index.head_dim * SizeOf(index.dtype);
  rows.head_stride = rows.row_stride * rows.page_rows;
  return rows;
}

}  // namespace kvstrata::cuda
