// SPDX-License-Identifier: Apache-2.0
// Where a list's k-th largest key lies: found digit by digit, each from a histogram.
#pragma once

#include <cstdint>

#include "kernels/cuda/warps/warp_sums.cuh"

namespace kvstrata::cuda {

inline constexpr int kBins = 2048;
inline constexpr int kPasses = 3;               // digits of 11, 11 and 10 bits
inline constexpr int kScanThreads = kBins / 4;  // that look through a histogram

__device__ constexpr int ShiftOf(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
__device__ constexpr uint32_t DigitMask(int pass) { return pass == 2 ? 1023 : 2047; }

// What a pass found: its digit, and how many keys of the range have a larger one, and this one.
struct Digit {
  uint32_t digit;
  int32_t above, population;
};

// The keys [low, top] that the k-th largest is among; `need` of them are taken, all above them, and
// none below. Where it is one key, its lowest indices fill `need`.
struct Boundary {
  uint32_t low = 0, top = ~0u;
  int32_t need = 0;
  int32_t population = 0;  // keys in [low, top]

  __device__ bool Holds(uint32_t key) const { return key - low <= top - low; }
  __device__ bool IsOneKey() const { return low == top; }

  // Narrows the range to the keys of a digit.
  __device__ void Narrow(const Digit& found, int pass) {
    low |= found.digit << ShiftOf(pass);
    top = low | ((1u << ShiftOf(pass)) - 1);
    need -= found.above;
    population = found.population;
    // Taken whole: everything above the key below is taken, and no tie is left.
    if (population == need && low > 0) {
      top = --low;
      need = 0;
    }
  }
};

// Bins 4 * at to 4 * at + 3, `above` keys above them: if the need-th largest key is in one of them,
// *found is its digit.
__device__ inline void FindInBins(const int4& bins, int at, int32_t above, int32_t need,
                                  Digit* found) {
  const int32_t sum = bins.x + bins.y + bins.z + bins.w;
  if (above >= need || need > above + sum) return;
  const int32_t next[3] = {bins.z, bins.y, bins.x};
  int32_t count = bins.w;
  auto digit = static_cast<uint32_t>(4 * at + 3);
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (above + count >= need) break;
    above += count;
    count = next[j];
    --digit;
  }
  *found = {digit, above, count};
}

// The digit of the need-th largest key, from the largest digit down. All threads of the CTA call
// it, at least kScanThreads. sums (kScanThreads / 32), found: in shared memory, not used since the
// last barrier.
__device__ inline Digit FindDigit(const int32_t* histogram, int32_t need, int32_t* sums,
                                  Digit* found) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int at = kScanThreads - 1 - static_cast<int>(threadIdx.x);
  int4 bins = {};
  int32_t sum = 0, inclusive = 0;
  if (at >= 0) {
    bins = reinterpret_cast<const int4*>(histogram)[at];
    sum = bins.x + bins.y + bins.z + bins.w;
    inclusive = WarpInclusiveSum(sum);
    if (lane == 31) sums[warp] = inclusive;
  }
  __syncthreads();
  if (at >= 0) {
    const int32_t of_group = lane < warp ? sums[lane] : 0;
    FindInBins(bins, at, __reduce_add_sync(~0u, of_group) + inclusive - sum, need, found);
  }
  __syncthreads();
  return *found;
}

}  // namespace kvstrata::cuda
