// SPDX-License-Identifier: Apache-2.0
// Raw rows of one (sequence, layer, KV head), keys or values, on pages: what the ops that pack
// segments take, many heads and layers a launch. PODs of device addresses; no CUDA header.
#pragma once

#include <cstdint>

#include "kernels/pages/dtype.h"

namespace kvstrata::cuda {

// Position t lies at pages[t / page_tokens] + offset + (t % page_tokens) * slot_stride. On the
// device.
struct HeadRows {
  uint64_t pages;      // address of an array of addresses of pages
  int64_t offset;      // bytes, a multiple of 16
  int32_t begin, end;  // positions [begin, end)
};

// What all heads of a launch share.
struct HeadRowShape {
  int32_t head_dim = 0;        // 64, 128 or 256
  int32_t page_tokens = 16;    // 16, 32 or 64
  int64_t slot_stride = 0;     // bytes from a token to the next, a multiple of 16
  DType dtype = DType::kBF16;  // kBF16 or kF16

  bool IsValid() const {
    return (page_tokens == 16 || page_tokens == 32 || page_tokens == 64) && slot_stride % 16 == 0;
  }
};

}  // namespace kvstrata::cuda
