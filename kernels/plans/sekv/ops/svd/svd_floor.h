// SPDX-License-Identifier: Apache-2.0
// Below which share of the largest singular value the backends of svd call one zero: above what
// fp64 leaves of a zero through a Gram matrix (sqrt(2^-52 * dim)), far below what bf16 factors
// keep.
#pragma once

namespace kvstrata {

inline constexpr double kSvdFloor = 0x1p-20;

}  // namespace kvstrata
