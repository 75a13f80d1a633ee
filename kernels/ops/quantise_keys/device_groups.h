// SPDX-License-Identifier: Apache-2.0
// Quantised keys of one layer of a batch, in the index blocks of its sequences, for kernels. PODs
// of device addresses; no CUDA header.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/pages/quantised_group.h"

namespace kvstrata::cuda {

// Group g of KV head h of sequence b lies at
//   blocks[b * block_stride + g / block_groups] + offset + h * head_stride + (g % block_groups) *
//   format.bytes().
struct DeviceGroups {
  const uint64_t* blocks = nullptr;  // device [batch][block_stride], addresses of index blocks
  int32_t block_stride = 0;
  int32_t block_groups = 0;
  int32_t kv_heads = 0;
  QuantisedGroup format;
  int64_t offset = 0, head_stride = 0;  // bytes, multiples of 16
};

// Byte offsets in a group, and its size.
struct GroupOffsets {
  int32_t tokens = 0, step = 0, codes = 0, high = 0, bytes = 0;

  static GroupOffsets Of(const QuantisedGroup& f) {
    return {f.tokens, static_cast<int32_t>(f.step_offset()), static_cast<int32_t>(f.codes_offset()),
            static_cast<int32_t>(f.high_offset()), static_cast<int32_t>(f.bytes())};
  }
};

}  // namespace kvstrata::cuda
