// SPDX-License-Identifier: Apache-2.0
// Which sealed groups stand for all where the noise of quantised logits is asked for
// (docs/spec/bits.md 3): the last of every eight, or of the fewer that there are. The first group
// is not among many: keys of sinks are unlike others. For the host and for kernels.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/candidates.h"

namespace kvstrata {

inline constexpr int32_t kNoiseEvery = 8;

// REQUIRES: groups > 0.
KVS_HOST_DEVICE inline int32_t FirstOfNoise(int32_t groups) {
  return groups < kNoiseEvery ? groups - 1 : kNoiseEvery - 1;
}

}  // namespace kvstrata
