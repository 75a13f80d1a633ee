// SPDX-License-Identifier: Apache-2.0
// Random packed rows (attend_packed.h) for GPU tests and benchmarks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

// `count` rows, each with keep / neighbours bits of its bitmap set and normal values.
inline std::vector<std::byte> RandomPackedRows(Rng& rng, const PackedRows& format, int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(count * format.stride));
  std::vector<int> bits(static_cast<size_t>(format.bits));
  std::iota(bits.begin(), bits.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    std::byte* row = bytes.data() + i * format.stride;
    std::shuffle(bits.begin(), bits.end(), rng);
    for (int b = 0; b < format.keep / format.neighbours; ++b) {
      const int bit = bits[static_cast<size_t>(b)];
      row[bit / 8] |= std::byte{1} << (bit % 8);
    }
    for (int j = 0; j < format.keep; ++j) {
      StoreFloat(row + format.value_offset + 2 * j, DType::kBF16, Normal(rng));
    }
  }
  return bytes;
}

// A [dim][dim] matrix that keeps the size of vectors about as it is.
inline std::vector<float> RandomRotation(Rng& rng, int dim) {
  std::vector<float> r(static_cast<size_t>(dim) * static_cast<size_t>(dim));
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (float& x : r) x = scale * Normal(rng);
  return r;
}

}  // namespace kvstrata::cuda
