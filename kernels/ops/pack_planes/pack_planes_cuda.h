// SPDX-License-Identifier: Apache-2.0
// Op pack_planes on the GPU: the groups that a range of tokens completes (pack_planes.h), in all KV
// heads of one layer, or of several at once.
//
// Bit for bit `ref`. Groups that begin at or after `from` rounded down and are complete at `to`:
// from / tokens of a group <= group < to / tokens of a group; an empty range writes nothing.
//
// Rows bf16 or fp16. Cost: reads each value from memory once, each key once and from the caches
// once more; one kernel, some 240 instructions of a warp a token with d = 128.
#pragma once

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/pack_planes/device_planes_cuda.h"

namespace kvstrata::cuda {

struct PackPlanesBatch {
  DeviceRows keys, values;        // one dtype; page_rows a multiple of 16
  DevicePlanes planes;            // written
  const int32_t* from = nullptr;  // device [batch], tokens
  const int32_t* to = nullptr;    // device [batch]
  int32_t batch = 0;
  int32_t groups_max = 0;  // groups that a call may complete in one sequence: the launch's shape
  int32_t layers = 1;      // rows and groups are of the first; batch * layers below 65536
  // Bytes, multiples of 32; of groups as their head_stride (device_planes_cuda.h).
  int64_t row_layer_stride = 0, upper_layer_stride = 0, lower_layer_stride = 0;
};

// cudaErrorInvalidValue for a shape that it does not take.
int PackPlanesCuda(const PackPlanesBatch& work, Stream stream);

}  // namespace kvstrata::cuda
