// SPDX-License-Identifier: Apache-2.0
// Which of the plans that a build may leave out it has: CMake's KVS_PLAN_SEKV and
// KVS_PLAN_MOSAICKV. Tables have empty rows for what is left out, which answers UNIMPLEMENTED
// (plan_axes.h). KVS_OF_NAME(...), by what a line of plans/plan_list.h names: empty without it.
#pragma once

#include <cstdint>

#define KVS_OF_ALWAYS(...) __VA_ARGS__
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
