// SPDX-License-Identifier: Apache-2.0
// Sealed groups of planes of one layer of a batch, for kernels. PODs of device addresses; no CUDA
// header.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/ops/pack_planes/planes_format.h"

namespace kvstrata::cuda {

// The upper or the lower runs of groups, in blocks of several. Addresses may be of host memory that
// is registered with CUDA: kernels do not ask.
struct DeviceRuns {
  // device [batch][block_stride], an address each, a multiple of 32, plus an s below 32
  const uint64_t* blocks = nullptr;
  int64_t offset = 0, head_stride = 0;  // bytes, multiples of 32; in a block 2^s times as much
};

// Group g of KV head h of sequence b: its upper run, like its lower one, lies at
//   address + (offset + h * head_stride) * 2^s + (g % block_groups) * bytes of a run
// with the address and the s of blocks[b * block_stride + g / block_groups]. So one offset serves
// blocks that are of runs [layers][kv_heads][2^s groups].
struct DevicePlanes {
  PlanesFormat format;
  DeviceRuns upper, lower;
  int32_t block_stride = 0;
  int32_t block_groups = 0;  // a power of two
  int32_t kv_heads = 0;
  // In blocks of one group, where upper runs are: records of copies of lower rows, one a KV head
  // (attend_planes_cuda.h, HotRows), with an offset and a stride as upper runs have. Sealing a
  // group empties its record. 0: there are none.
  int64_t hot_offset = 0, hot_head_stride = 0;

  static constexpr int64_t kHotTagBytes = 128;  // in front of a record's copies; all 0: it is empty
  static constexpr int64_t HotRecordBytes(int32_t rows, int64_t row_bytes) {
    return kHotTagBytes + rows * row_bytes;
  }

  constexpr bool IsValid() const {
    const int64_t bytes = upper.offset | upper.head_stride | lower.offset | lower.head_stride |
                          hot_offset | hot_head_stride;  // all of 32
    return format.IsValid() && kv_heads > 0 && block_groups > 0 &&
           std::has_single_bit(static_cast<uint32_t>(block_groups)) && bytes % 32 == 0 &&
           (hot_offset == 0 || block_groups == 1);
  }
};

}  // namespace kvstrata::cuda
