// Op importance on the GPU: what a prompt's last queries pay to each token (op vote, a query an
// item) summed over the queries, and the maximum over a window of tokens
// (docs/spec/sentencekv.md 2).
//
// Items may come in several calls, in order: sums in fp32, in their order. The same input gives the
// same bits. Two kernels, the second with the last items. Cost: reads the votes once; the maximum
// reads `pool` sums a token.
#ifndef KVSTRATA_KERNELS_OPS_IMPORTANCE_IMPORTANCE_CUDA_H_
#define KVSTRATA_KERNELS_OPS_IMPORTANCE_IMPORTANCE_CUDA_H_

#include "kernels/cuda/batch.h"

namespace kvstrata::cuda {

struct ImportanceBatch {
  const float* votes = nullptr;  // device [items][kv_heads][stride]
  int32_t items = 0, kv_heads = 0, stride = 0;
  int32_t tokens = 0;                // of a list, that get an importance
  bool first = false, last = false;  // items of the prompt
  int32_t pool = 1;                  // width: token t gets the maximum of [t - (pool - 1) / 2, t +
                                     // pool / 2], cut at the ends
  float* sums = nullptr;             // device [kv_heads][stride]
  float* importance = nullptr;  // device [kv_heads][stride], written with the last items: token
                                // begin's first
  int32_t begin = 0;
};

// cudaErrorInvalidValue for a shape that it does not take.
int ImportanceCuda(const ImportanceBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_IMPORTANCE_IMPORTANCE_CUDA_H_
