// SPDX-License-Identifier: Apache-2.0
// Op quantise_keys on the GPU: the groups that a range of tokens completes (quantise_keys.h), in
// all KV heads of one layer, or of several at once.
//
// Bit for bit `ref`. Groups that begin at or after `from` rounded down and are complete at `to`:
// from / tokens of a group <= group < to / tokens of a group; an empty range writes nothing.
//
// Keys bf16 or fp16. Cost: reads each key from memory once and from the caches twice more; one
// kernel.
#pragma once

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/quantise_keys/device_groups.h"

namespace kvstrata::cuda {

struct QuantiseKeysBatch {
  DeviceRows keys;                // KeyRows
  DeviceGroups groups;            // written
  const int32_t* from = nullptr;  // device [batch], tokens
  const int32_t* to = nullptr;    // device [batch]
  int32_t batch = 0;
  int32_t groups_max = 0;  // groups that a call may complete in one sequence: the launch's shape
  int32_t layers = 1;      // keys and groups are of the first; batch * layers below 65536
  int64_t key_layer_stride = 0, group_layer_stride = 0;  // bytes, multiples of 16
};

// cudaErrorInvalidValue for a shape that it does not take.
int QuantiseKeysCuda(const QuantiseKeysBatch& work, Stream stream);

}  // namespace kvstrata::cuda
