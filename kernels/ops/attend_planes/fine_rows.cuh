// SPDX-License-Identifier: Apache-2.0
// Fine tokens of a group, by a whole warp: a list of them, their logits (the coarse ones and what
// planes 1 and 2 add, eight tokens a product), and the lower digits of their values.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/cuda/warps/select_bits.cuh"
#include "kernels/ops/attend_planes/coarse_keys.cuh"

namespace kvstrata::cuda {

// The number in the group of a lane's token i of 8, of whole chunks (planes_item.cuh).
__device__ __forceinline__ int TokenOf(int lane, int i) {
  return kStripTokens * (lane / 8) + 8 * (i / 4) + 4 * (lane / 4 % 2) + i % 4;
}

// What of a fine code is stored.
struct FineForm {
  bool has_last_plane;
  int32_t row_bytes;
  __device__ float centre() const { return has_last_plane ? 0.0f : 7.5f; }  // a cell's

  // Half the variance that the digits below plane 0 add to a logit, times log2(e), over
  // GroupSums::squares (docs/spec/planes.md, "A step", rule 2). base: LaneFactors'.
  __device__ float RoundingOf(float base) const {
    const float digits = has_last_plane ? 341.25f : 320.0f;  // RoundingVariance
    return base * base * (digits * kLn2 / 2 / 4096);
  }
};

// Keeps what logits of fine tokens are made of besides their lower digits. base: of GroupSums, with
// the centre of a fine cell.
template <int kDim, int kHeads>
__device__ __forceinline__ void KeepSums(WarpMemory<kDim, kHeads>& memory, const float (&base)[2],
                                         const OwnSums<kHeads>& own) {
  const int lane = threadIdx.x % 32, head = 2 * (lane % 4) % kHeads;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    *reinterpret_cast<float2*>(memory.Sums(TokenOf(lane, own.first() + i)) + head) = {own.at[i][0],
                                                                                      own.at[i][1]};
  }
  if (lane < kHeads / 2) *reinterpret_cast<float2*>(&memory.base[head]) = {base[0], base[1]};
}

// Lists the tokens whose bits are set in `chosen`, the same in lanes of one g. Returns how many.
template <int kDim, int kHeads>
__device__ __forceinline__ int ListTokens(WarpMemory<kDim, kHeads>& memory, uint32_t chosen) {
  const int lane = threadIdx.x % 32, first = 2 * (lane % 4);  // its own two of its g's tokens
  int count = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_chosen = (chosen >> (first + i) & 1) != 0;
    const uint32_t lanes = __ballot_sync(kAllLanes, is_chosen);
    if (is_chosen) {
      memory.fine[count + __popc(lanes & ((1u << lane) - 1))] =
          static_cast<uint8_t>(TokenOf(lane, first + i));
    }
    count += __popc(lanes);
  }
  return count;
}

// Field m of run m of plane 1 in row g, and of four bits of plane 2 in row g + 8, moved to where
// fields m of other planes are: the query has 4^-m in it. nibbles: the word of plane 2 that has the
// run, which two share.
__device__ __forceinline__ void MultiplyLower(float (&c)[4], uint32_t bits, uint32_t nibbles, int m,
                                              const __half2 (&query)[2]) {
  const uint32_t mask = 0x00030003u << 2 * m, wide = 0x000F000Fu << 2 * m;
  const uint32_t low = m % 2 == 0 ? nibbles : nibbles << 2;
  const uint32_t high = m % 2 == 0 ? nibbles >> 8 : nibbles >> 6;
  MmaM16N8K16<__half>(c, bits & mask, low & wide, bits >> 8 & mask, high & wide, BitsOf(query[0]),
                      BitsOf(query[1]));
}

// Logits of fine token first + g, whose rows are in memory, for heads 2t and 2t + 1. scales: of
// the group. Of tokens beyond the list they are anything.
template <int kDim, int kHeads>
__device__ __forceinline__ void FineLogits(const WarpMemory<kDim, kHeads>& memory, int first,
                                           const FineForm& form, const KeyScales<kDim>& scales,
                                           const SharedQuery<kDim>& query,
                                           const LaneFactors& factors, float (&logits)[2]) {
  constexpr int kWords = GroupShape<kDim>::kWords;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  LanePairs<kDim, 2> folded;
  FoldSteps(scales, query, folded);
  const auto* const row = reinterpret_cast<const uint32_t*>(memory.rows[g]) + kWords * t;
  const int token = memory.fine[first + g] % kGroupTokens;
  float even[4] = {}, odd[4] = {};  // runs m
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    const uint32_t plane2[2] = {form.has_last_plane ? row[kDim / 16 + u] : 0,
                                form.has_last_plane ? row[kDim / 8 + u] : 0};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      MultiplyLower(m % 2 == 0 ? even : odd, row[u], plane2[m % 2], m, folded.at[m][u]);
    }
  }
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const float plane1 = even[head] + odd[head], plane2 = even[2 + head] + odd[2 + head];
    const float of_rest = fmaf(16, plane1, plane2) * (1.0f / 64);
    const int of_head = (2 * t + head) % kHeads;
    logits[head] =
        fmaf(memory.Sums(token)[of_head] + of_rest, factors.code[head], memory.base[of_head]);
  }
}

// Four codes of lower digits, each in the low six bits of a byte: channels 0, 2, 1, 3 of a run's
// word. m: the run. The two bits above are anything: kLowerDigits leaves them out.
__device__ __forceinline__ uint32_t LowerCodes(uint32_t plane1, uint32_t plane2, int m) {
  const uint32_t high = m < 2 ? plane1 << (4 - 2 * m) : plane1 >> (2 * m - 4);
  return SelectBits(0xF0F0F0F0u, high, plane2 >> 4 * (m / 2));
}
inline constexpr uint32_t kLowerDigits = 0x003F003F;  // every second code's

}  // namespace kvstrata::cuda
