// Op mean_query on the GPU: the mean of a prompt chunk's queries, which stands for the chunk where
// a selector selects in prefill (docs/spec/tokenselect.md 4). Sums in double, in a fixed order.
//
// One kernel. Cost: reads each query once.
#ifndef KVSTRATA_KERNELS_OPS_MEAN_QUERY_MEAN_QUERY_CUDA_H_
#define KVSTRATA_KERNELS_OPS_MEAN_QUERY_MEAN_QUERY_CUDA_H_

#include "kernels/cuda/batch.h"

namespace kvstrata::cuda {

struct MeanQueryBatch {
  const void* q = nullptr;  // device [rows][row_floats]
  DType q_dtype = DType::kBF16;
  int32_t rows = 0;
  int32_t row_floats = 0;  // query_heads * head_dim, a multiple of 32
  float* mean = nullptr;   // device [row_floats], written
};

// cudaErrorInvalidValue for a shape that it does not take.
int MeanQueryCuda(const MeanQueryBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_MEAN_QUERY_MEAN_QUERY_CUDA_H_
