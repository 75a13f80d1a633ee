// Op cascade on the GPU: one list of pages for all layers and heads of a sequence, from key-key
// affinity (docs/spec/chess.md 2 to 4), as kernels/select/affinity.h and cascade.cc choose them.
//
// The anchor is the mean page vector of the recent window; every page, chunk and grid is scored
// against it; the best grids, of their chunks the best, of their pages the best are kept,
// ascending. Vectors are all layers and heads in one, means as op summarize writes them; those of
// units that are still filling are made here and thrown away. Equal scores keep the lower index,
// NaN ranks below everything.
//
// A selection sees a sequence as it was at `tokens`, whatever was appended since; the rows of all
// units that were complete then must be written. The same input gives the same list, alone or in
// any batch.
//
// Three kernels. Cost: reads every row of the index once (1.56 % of the keys' and values' bytes at
// pages of 32 tokens), then one CTA a sequence goes five times over a level's scores. Sums in fp32:
// near-ties may fall otherwise than on the CPU, which adds heads up in double.
#ifndef KVSTRATA_KERNELS_OPS_CASCADE_CASCADE_CUDA_H_
#define KVSTRATA_KERNELS_OPS_CASCADE_CASCADE_CUDA_H_

#include "kernels/cuda/device_rows.h"

namespace kvstrata::cuda {

struct CascadeBatch {
  DeviceRows keys;               // of the first layer
  int64_t key_layer_stride = 0;  // bytes, a multiple of 16
  // Means of pages, chunks, grids, bf16, from the first layer on; the layers of a block lie one
  // behind the other, so that head h of layer l is head l * kv_heads + h.
  DeviceRows levels[3];
  int32_t layers = 0;
  int32_t page_tokens = 0, pages_per_chunk = 0, chunks_per_grid = 0;
  int32_t sinks = 0, window = 0;    // pages: never candidates
  double rho[3] = {};               // shares that are kept: of grids, of chunks, of pages
  const int32_t* tokens = nullptr;  // device [batch], 1 or more; below 0: nothing is selected, and
                                    // what is there stays
  int32_t batch = 0;
  int32_t pages_max = 0;      // complete pages a sequence may have: fixes the launch shape
  void* scratch = nullptr;    // device, batch * CascadeScratchBytes, 16-byte aligned, any content
  int32_t* units = nullptr;   // device [batch][list_stride], written: pages, ascending
  int32_t* counts = nullptr;  // device [batch], written
  int32_t list_stride = 0;    // at least pages_max
};

// Scores of a sequence: pages, chunks, grids, filling ones included, in multiples of 16.
inline int64_t CascadeUnits(int32_t pages_max) {
  return (int64_t{3} * pages_max + 2 + 15) / 16 * 16;
}
// Bytes for one sequence; channels: layers * kv_heads * head_dim.
inline int64_t CascadeScratchBytes(int64_t channels, int32_t pages_max) {
  constexpr int64_t kAnchor = 4, kFilling = 2 * 2, kScore = 4, kKept = 1;
  return channels * (kAnchor + kFilling) + CascadeUnits(pages_max) * (kScore + kKept);
}

// cudaErrorInvalidValue for a shape that it does not take.
int CascadeCuda(const CascadeBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_CASCADE_CASCADE_CUDA_H_
