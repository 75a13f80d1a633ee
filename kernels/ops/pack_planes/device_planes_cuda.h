// SPDX-License-Identifier: Apache-2.0
// Sealed groups of planes of one layer of a batch, for kernels. PODs of device addresses; no CUDA
// header.
#ifndef KVSTRATA_KERNELS_OPS_PACK_PLANES_DEVICE_PLANES_CUDA_H_
#define KVSTRATA_KERNELS_OPS_PACK_PLANES_DEVICE_PLANES_CUDA_H_

#include <bit>
#include <cstdint>

#include "kernels/ops/pack_planes/planes_format.h"

namespace kvstrata::cuda {

// The upper or the lower runs of groups, in blocks of several. Addresses may be of host memory that
// is registered with CUDA: kernels do not ask.
struct DeviceRuns {
  const uint64_t* blocks = nullptr;     // device [batch][block_stride], multiples of 32
  int64_t offset = 0, head_stride = 0;  // bytes, multiples of 32
};

// Group g of KV head h of sequence b: its upper run, like its lower one, lies at
//   blocks[b * block_stride + g / block_groups] + offset + h * head_stride + (g % block_groups) *
//   bytes of a run.
struct DevicePlanes {
  PlanesFormat format;
  DeviceRuns upper, lower;
  int32_t block_stride = 0;
  int32_t block_groups = 0;  // a power of two
  int32_t kv_heads = 0;

  constexpr bool IsValid() const {
    const int64_t bytes =
        upper.offset | upper.head_stride | lower.offset | lower.head_stride;  // all of 32
    return format.IsValid() && kv_heads > 0 && block_groups > 0 &&
           std::has_single_bit(static_cast<uint32_t>(block_groups)) && bytes % 32 == 0;
  }
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_PACK_PLANES_DEVICE_PLANES_CUDA_H_
