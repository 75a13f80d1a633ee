// SPDX-License-Identifier: Apache-2.0
// Which of the plans that a build may leave out it has: CMake's KVS_PLAN_SEKV and
// KVS_PLAN_MOSAICKV. Tables of rows have empty ones for what is left out, and its pairs answer
// UNIMPLEMENTED (plan_axes.h).
#ifndef KVSTRATA_KERNELS_PLAN_BUILT_PLANS_H_
#define KVSTRATA_KERNELS_PLAN_BUILT_PLANS_H_

#include <cstdint>

#ifdef KVS_WITHOUT_SEKV
#define KVS_OF_SEKV(...) \
  {}
#else
#define KVS_OF_SEKV(...) __VA_ARGS__
#endif
#ifdef KVS_WITHOUT_MOSAICKV
#define KVS_OF_MOSAICKV(...) \
  {}
#else
#define KVS_OF_MOSAICKV(...) __VA_ARGS__
#endif

namespace kvstrata {

inline constexpr bool kHasSekv = KVS_OF_SEKV(true);
inline constexpr bool kHasMosaicKv = KVS_OF_MOSAICKV(true);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_BUILT_PLANS_H_
