// SPDX-License-Identifier: Apache-2.0
// What hosts work out for kernels that shift where they would divide. Constant time; any thread.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

inline bool IsPowerOfTwo(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }
// REQUIRES: x is a power of two, or below 2: then 0.
inline int32_t Log2(int32_t x) { return x <= 1 ? 0 : 31 - __builtin_clz(static_cast<unsigned>(x)); }

}  // namespace kvstrata::cuda
