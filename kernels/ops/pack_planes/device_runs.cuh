// SPDX-License-Identifier: Apache-2.0
// Where runs of groups lie (device_planes_cuda.h), for kernels.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// The first run of a head in the block of a table's entry. offset: DeviceRuns::offset with that of
// the head, and whatever the caller adds of the same kind.
__device__ __forceinline__ uint64_t FirstRunIn(uint64_t entry, int64_t offset) {
  constexpr uint64_t kShift = 31;
  return (entry & ~kShift) + (offset << (entry & kShift));
}

}  // namespace kvstrata::cuda
