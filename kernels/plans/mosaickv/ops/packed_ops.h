// SPDX-License-Identifier: Apache-2.0
// The ops of codec packed on a CPU: OpsOf<PackedOps>(backend.packed).
#pragma once

#include "kernels/ops/plan_ops.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "kernels/plans/mosaickv/ops/covariance/covariance.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack.h"

namespace kvstrata {

struct PackedOps : PlanOps {
  void (*attend_packed)(const AttendPackedWork*, int64_t, Executor&) = nullptr;
  void (*score_packed)(const ScorePackedWork*, int64_t, Executor&) = nullptr;
  void (*rotate)(const RotateWork*, int64_t, Executor&) = nullptr;
  void (*rotate_pack)(const RotatePackWork*, int64_t, Executor&) = nullptr;
  void (*covariance)(const CovarianceWork*, int64_t, Executor&) = nullptr;
};

inline constexpr PackedOps kPackedSimd = {{},         AttendPackedSimd, ScorePackedSimd,
                                          RotateSimd, RotatePackSimd,   CovarianceSimd};
inline constexpr PackedOps kPackedRef = {{},        AttendPackedRef, ScorePackedRef,
                                         RotateRef, RotatePackRef,   CovarianceRef};

}  // namespace kvstrata
