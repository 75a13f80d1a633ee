// SPDX-License-Identifier: Apache-2.0
// Op summarize on the GPU: the summary rows of the units that a range of tokens completes
// (summarize.h), in all KV heads of one layer, or of several at once.
//
//   kMinMax     element-wise minimum and maximum, in the source's dtype
//   kDeviation  mean and variance, in the source's dtype
//   kMean       fp32 sum in order of position, divided once, rounded to bf16 or kept as fp32
// Bit for bit `ref`. Units that begin at or after `from` rounded down and are complete at `to`:
// from / unit_rows <= unit < to / unit_rows; an empty range writes nothing. The means of a coarser
// level are the same op over the rows of the finer one, whose `row_tokens` let both have one range.
//
// Source rows bf16 or fp16 (kMean: also fp32), head_dim a multiple of 8.
// Cost: reads each row once (kDeviation twice, the second time from the L1), writes 2 / unit_rows
// (kMean: 1 / unit_rows) of it; one kernel.
#pragma once

#include "kernels/cuda/batches/device_rows.h"

namespace kvstrata::cuda {

struct SummarizeBatch {
  enum class Kind : uint8_t { kMinMax, kDeviation, kMean };
  Kind kind = Kind::kMean;
  DeviceRows source;              // keys (KeyRows), or the rows of a finer level
  DeviceRows summary;             // written: field 0, minima or means
  int64_t field_stride = 0;       // bytes from a minimum to its maximum, a mean to its variance
  int32_t unit_rows = 0;          // rows of the source a unit has
  int32_t row_tokens = 1;         // what a row of the source counts for in `from` and `to`
  const int32_t* from = nullptr;  // device [batch], rows of the source, or tokens (row_tokens)
  const int32_t* to = nullptr;    // device [batch]
  int32_t batch = 0;
  int32_t units_max = 0;  // units that a call may complete in one sequence: fixes the launch shape
  int32_t layers = 1;     // source and summary are of the first; batch * layers below 65536
  int64_t source_layer_stride = 0, summary_layer_stride = 0;  // bytes, multiples of 16
};

// cudaErrorInvalidValue for a shape that it does not take.
int SummarizeCuda(const SummarizeBatch& work, Stream stream);

}  // namespace kvstrata::cuda
