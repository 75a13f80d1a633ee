// SPDX-License-Identifier: Apache-2.0
// Op append on the GPU (contract: append.h): writes the new tokens of a batch into the pages of one
// layer and, in the same kernel, the index rows of the units that they complete.
//
// Lengths are advanced once a step, before the first layer, and include the new tokens from then
// on: a captured step is advance, then append and attend of every layer, and all of them read the
// same lengths.
//
// Rows that are not finite are noted for whoever asks.
//
// One CTA is one (sequence, KV head); without an index, long appends are shared by several.
// Cost: reads and writes the new rows once, and reads the rows of completed units.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/batches/batch.h"
#include "kernels/pages/page_view.h"

namespace kvstrata::cuda {

// Keys or values as the engine has them, [rows][kv_heads][head_dim]. Addresses and strides are
// multiples of 16.
struct DeviceSource {
  const void* data = nullptr;  // device, row 0, head 0
  int64_t row_stride = 0;      // bytes
  int64_t head_stride = 0;     // bytes
  DType dtype = DType::kBF16;

  DeviceSource From(int64_t row) const {
    return {static_cast<const std::byte*>(data) + row * row_stride, row_stride, head_stride, dtype};
  }
  bool IsAligned() const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % 16 == 0 &&
           head_stride % 16 == 0;
  }
};

// The index rows of one layer that append keeps up to date: minima and maxima of keys (one level),
// or means at every level, as summarize.h defines them, bit for bit. Coarse rows are not written.
struct DeviceIndex {
  struct Level {
    int32_t unit_tokens = 0, units_per_block = 0;
    int64_t offset = 0;  // bytes from a block's start to the layer's first row
  };
  IndexLayout::Kind kind = IndexLayout::Kind::kNone;
  DType dtype = DType::kBF16;        // kMinMax: the pages' dtype; kMean: kBF16 or kF32
  const uint64_t* blocks = nullptr;  // device [batch][block_stride], addresses of index blocks
  int32_t block_stride = 0;
  int32_t level_count = 0;
  Level levels[3];
};

// Where it is noted that a row of sequence b has a NaN or an infinity, as its page holds it: word
// of[b] becomes 1. None becomes 0: that is the caller's.
struct NotFiniteWords {
  uint32_t* words = nullptr;    // memory of the host that the GPU may write; null: nobody asks
  const int32_t* of = nullptr;  // device [batch]
};

struct AppendBatch {
  PagedLayer layer;
  int32_t batch = 0;
  const int32_t* tokens = nullptr;  // device [batch], lengths with the new tokens
  const int32_t* starts = nullptr;  // device [batch + 1]: rows [starts[b], starts[b + 1]) are the
                                    // new ones of sequence b; null: row b, one each
  int32_t rows_max = 0;             // rows of k and v that the batch may have: sets the grid
  DeviceSource k, v;
  DeviceIndex index;
  NotFiniteWords not_finite;
  bool ahead = false;  // launch.cuh; of the pages, tokens, starts and not_finite.of
  // The kernel behind this one reads ahead (launch.cuh), so it may start at once. One that only
  // waits would take room from the kernel before while that runs.
  bool next_reads_ahead = false;
};

// cudaErrorInvalidValue: a shape outside the ranges above.
int AppendCuda(const AppendBatch& work, Stream stream);

}  // namespace kvstrata::cuda
