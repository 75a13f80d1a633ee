// Op merge on the GPU (contract: merge.h): partials of a batch's queries to attention outputs.
// attend_raw does the same at its end; this kernel is for plans whose last part is another op.
#ifndef KVSTRATA_KERNELS_OPS_MERGE_MERGE_CUDA_H_
#define KVSTRATA_KERNELS_OPS_MERGE_MERGE_CUDA_H_

#include "kernels/cuda/batch.h"

namespace kvstrata::cuda {

// Partials as merge.h defines them, `parts` of each query row. A part without rows: m -inf, l 0.
struct Partials {
  float* m = nullptr;  // device [parts][batch][query_heads], natural logarithms
  float* l = nullptr;  // device [parts][batch][query_heads]
  float* o = nullptr;  // device [parts][batch][query_heads][head_dim], 16-byte aligned
  int32_t parts = 0;
};

// Where outputs go.
struct AttentionOutput {
  void* rows = nullptr;  // device [batch][query_heads][head_dim], 16-byte aligned
  DType dtype = DType::kBF16;
  float* lse = nullptr;  // device [batch][query_heads], natural; null: not wanted
};

struct MergeBatch {
  Partials from;  // parts >= 1, taken in order
  AttentionOutput to;
  int32_t batch = 0, query_heads = 0, head_dim = 0;
};

// One kernel. Cost: reads the partials once. cudaErrorInvalidValue: a head_dim that is no multiple
// of 4, no parts, no output.
int MergeCuda(const MergeBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_MERGE_MERGE_CUDA_H_
