// SPDX-License-Identifier: Apache-2.0
// Below which share of the largest singular value the backends of svd call one zero: above what
// fp64 leaves of a zero through a Gram matrix (sqrt(2^-52 * dim)), far below what bf16 factors
// keep.
#ifndef KVSTRATA_KERNELS_PLANS_SEKV_OPS_SVD_SVD_FLOOR_H_
#define KVSTRATA_KERNELS_PLANS_SEKV_OPS_SVD_SVD_FLOOR_H_

namespace kvstrata {

inline constexpr double kSvdFloor = 0x1p-20;

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLANS_SEKV_OPS_SVD_SVD_FLOOR_H_
