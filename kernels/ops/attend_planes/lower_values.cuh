// SPDX-License-Identifier: Apache-2.0
// Sums of weighted lower digits of values of whole groups, by a whole warp: eight tokens' bytes are
// turned into what tensor cores take by channel.
#pragma once

#include "kernels/ops/attend_planes/coarse_values.cuh"

namespace kvstrata::cuda {

// Sums over tokens of weight times step times lower digits of values, rows as in ValueSums.
template <int kDim>
class LowerValueSums {
 public:
  template <typename Memory>
  __device__ __forceinline__ void Add(const Memory& memory, const StripWeights& weights,
                                      const FineForm& form) {
    constexpr int kRun = kDim / 16;  // words of a run
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4* const steps = &memory.value_scales[2 * t + kGroupTokens / 8];
#pragma unroll
    for (int four = 0; four < 4; ++four) {  // tokens 4 four .. of strip t
      uint32_t stepped[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int i = 2 * four + pair;
        stepped[pair] = BitsOf(
            __hmul2(HalvesOf(weights.at[pair][four]), HalvesOf(PartOf(steps[i / 4], i % 4))));
      }
#pragma unroll
      for (int k = 0; k < GroupShape<kDim>::kPieces; ++k) {
        const int quad = 8 * k + g, m = quad / kRun, word = quad % kRun;
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto* const row = reinterpret_cast<const uint32_t*>(memory.value_rows) +
                                  ((4 * four + i) * kGroupStrips + t) * (form.row_bytes / 8);
          const uint32_t plane2 = form.has_last_plane ? row[kRun + m % 2 * kRun + word] : 0;
          x[i] = LowerCodes(row[word], plane2, m);
        }
        const uint32_t low01 = LowHalves(x[0], x[1]), high01 = HighHalves(x[0], x[1]);
        const uint32_t low23 = LowHalves(x[2], x[3]), high23 = HighHalves(x[2], x[3]);
        constexpr uint32_t kMask = kLowerDigits;
        MmaM16N8K16<__half>(o_[2 * k], low01 & kMask, high01 & kMask, low23 & kMask, high23 & kMask,
                            stepped[0], stepped[1]);
        MmaM16N8K16<__half>(o_[2 * k + 1], low01 >> 8 & kMask, high01 >> 8 & kMask,
                            low23 >> 8 & kMask, high23 >> 8 & kMask, stepped[0], stepped[1]);
      }
    }
  }

  __device__ __forceinline__ void Scale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) o_[i / 4][i % 4] *= factor[i % 2];
  }

  // Adds this to a warp's sums.
  template <int kHeads>
  __device__ __forceinline__ void Store(float (&o)[kHeads][kDim]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (2 * t >= kHeads) return;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
      for (int tile = 0; tile < kDim / 16; ++tile) {
        float* const at = o[2 * t + head] + tile / 2 * 32 + 4 * g + tile % 2 * 2;
        at[0] = fmaf(0x1p24f, o_[tile][head], at[0]);
        at[1] = fmaf(0x1p24f, o_[tile][2 + head], at[1]);
      }
    }
  }

 private:
  float o_[kDim / 16][4] = {};
};

}  // namespace kvstrata::cuda
