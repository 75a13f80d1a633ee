// The CUDA backend: one table of functions, exported by libkvstrata_cuda.so under one name. The
// library holds everything that touches CUDA; daemon, client and tests reach it through here
// (cuda_library.h loads it) and link no CUDA themselves (DECISIONS 16).
//
// An op enqueues its kernels on a stream and returns: no synchronisation, no allocation, nothing on
// the host that a captured graph would miss. It returns 0, or a cudaError_t that `error_text`
// names; errors of the kernels themselves show at the stream's next synchronisation.
// Threads: any; the current device is the stream's.
#ifndef KVSTRATA_KERNELS_CUDA_CUDA_OPS_H_
#define KVSTRATA_KERNELS_CUDA_CUDA_OPS_H_

#include <cstdint>

#include "kernels/cuda/batch.h"
#include "kernels/ops/append/append_cuda.h"
#include "kernels/ops/attend_raw/attend_raw_cuda.h"
#include "kernels/ops/merge/merge_cuda.h"

namespace kvstrata::cuda {

inline constexpr uint32_t kCudaOpsVersion = 1;  // of this table: loader and library must agree

struct CudaOps {
  uint32_t version = kCudaOpsVersion;
  const char* (*error_text)(int code) = nullptr;
  // GPUs that this process sees; 0 without a driver, whatever the reason.
  int (*device_count)() = nullptr;

  // ops/append, ops/attend_raw, ops/merge: what each takes and costs is in its *_cuda.h.
  int (*append)(const AppendBatch& work, Stream stream) = nullptr;
  int (*advance_tokens)(int32_t* tokens, const int32_t* starts, int32_t batch,
                        Stream stream) = nullptr;
  int64_t (*attend_raw_workspace_bytes)(int32_t group, int32_t head_dim) = nullptr;
  int (*attend_raw)(const AttendRawBatch& work, Stream stream) = nullptr;
  int (*merge)(const MergeBatch& work, Stream stream) = nullptr;
};

}  // namespace kvstrata::cuda

extern "C" [[gnu::visibility("default")]] const kvstrata::cuda::CudaOps* kvs_cuda_ops();

#endif  // KVSTRATA_KERNELS_CUDA_CUDA_OPS_H_
