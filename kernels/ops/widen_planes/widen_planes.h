// SPDX-License-Identifier: Apache-2.0
// Op widen_planes: all rows of one sequence of a layer side by side, for an attention that knows no
// planes: sealed groups as widened rows (docs/spec/planes.md 5), what is not sealed as it is.
//
// Tokens are, in order: those of `groups` sealed groups; `raw` rows on pages; `added` rows of the
// engine's. Widened values are rotated back in fp32, so all bits are those of op unpack_planes,
// rounded to the dtype.
// Cost: reads each group and row once, and writes each row once.
#pragma once

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/append/append_cuda.h"
#include "kernels/ops/pack_planes/device_planes_cuda.h"

namespace kvstrata::cuda {

struct WidenPlanesBatch {
  DevicePlanes planes;              // one sequence's: blocks [block_stride]
  int32_t groups = 0;               // that are widened
  DeviceRows raw_keys, raw_values;  // pages [page_stride]; row 0 is the first behind the groups
  int32_t raw = 0;
  DeviceSource new_k, new_v;  // rows of `added` tokens
  int32_t added = 0;
  // Written: device [tokens()][kv_heads][dim], aligned to 16. All rows have one dtype, bf16 or
  // fp16.
  DType dtype = DType::kBF16;
  void *keys = nullptr, *values = nullptr;

  constexpr int32_t sealed() const { return groups * planes.format.tokens; }
  constexpr int32_t tokens() const { return sealed() + raw + added; }
};

// The truth; all of the batch's memory is the host's.
void WidenPlanesRef(const WidenPlanesBatch& work);

}  // namespace kvstrata::cuda
