// SPDX-License-Identifier: Apache-2.0
// The ops of codec packed on a GPU: OpsOf<cuda::PackedOps>(ops.packed).
#pragma once

#include "kernels/ops/plan_ops.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed_cuda.h"
#include "kernels/plans/mosaickv/ops/covariance/covariance_cuda.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack_cuda.h"

namespace kvstrata::cuda {

struct PackedOps : PlanOps {
  int (*score_packed)(const ScorePackedBatch& work, Stream stream) = nullptr;
  int64_t (*attend_packed_workspace_bytes)(const AttendPackedBatch& work) = nullptr;
  int (*attend_packed)(const AttendPackedBatch& work, Stream stream) = nullptr;
  // What makes packed segments (kernels/plans/mosaickv/cuda_packer.h).
  int64_t (*covariance_workspace_bytes)(const CovarianceBatch& work) = nullptr;
  int (*covariance)(const CovarianceBatch& work, Stream stream) = nullptr;
  int (*rotate_pack)(const RotatePackBatch& work, Stream stream) = nullptr;
};

// The library's, which alone has these functions.
inline constexpr PackedOps kPackedCuda = {{},
                                          ScorePackedCuda,
                                          AttendPackedWorkspaceBytes,
                                          AttendPackedCuda,
                                          CovarianceWorkspaceBytes,
                                          CovarianceCuda,
                                          RotatePackCuda};

}  // namespace kvstrata::cuda
