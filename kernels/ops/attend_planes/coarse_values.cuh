// SPDX-License-Identifier: Apache-2.0
// Sums of weighted values of groups of 64 tokens by a whole warp: plane 0 of their strips on tensor
// cores, codes as in coarse_keys.cuh, channels as rows; and lower digits of some.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/cuda/warps/mma_m16n8k8.cuh"
#include "kernels/ops/attend_planes/fine_rows.cuh"

namespace kvstrata::cuda {

// Weights of strip t for head g, as fp16: tokens 4m, 4m + 1 in at[0][m] and the next two in
// at[1][m].
struct StripWeights {
  uint32_t at[2][4];

  // weights[L][i]: of a lane's token i of chunk L, for heads 2t and 2t + 1 (planes_item.cuh).
  __device__ __forceinline__ static StripWeights Of(const uint32_t (&weights)[2][4]) {
    StripWeights out;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint2 pairs[2];
      Transpose(weights[chunk], pairs);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        out.at[pair][2 * chunk] = pairs[pair].x;
        out.at[pair][2 * chunk + 1] = pairs[pair].y;
      }
    }
    return out;
  }

  // To the warp's memory. weights: of the tokens of OwnSums.
  template <int kDim>
  __device__ __forceinline__ static void Store(WarpMemory<kDim, 8>& memory,
                                               const uint32_t (&weights)[8]) {
    uint32_t of_chunks[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) of_chunks[i / 4][i % 4] = weights[i];
    Of(of_chunks).Store(memory);
  }
  // Rows of the transpose are heads of the first chunk, then of the second.
  template <int kDim>
  __device__ __forceinline__ static void Store(WarpMemory<kDim, 4>& memory,
                                               const uint32_t (&weights)[4]) {
    const int lane = threadIdx.x % 32;
    uint2 pairs[2];
    Transpose(weights, pairs);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      reinterpret_cast<uint2*>(&memory.weights[pair][lane % 16])[lane / 16] = pairs[pair];
    }
  }

  // To the warp's memory and from there, behind a __syncwarp.
  template <int kDim, int kHeads>
  __device__ __forceinline__ void Store(WarpMemory<kDim, kHeads>& memory) const {
    const int lane = threadIdx.x % 32;
    if (lane >= 4 * kHeads) return;
    for (int pair = 0; pair < 2; ++pair) {
      memory.weights[pair][lane] = {at[pair][0], at[pair][1], at[pair][2], at[pair][3]};
    }
  }
  template <int kDim, int kHeads>
  __device__ __forceinline__ static StripWeights Load(const WarpMemory<kDim, kHeads>& memory) {
    StripWeights out;
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 four = memory.weights[pair][threadIdx.x % (4 * kHeads)];
      for (int m = 0; m < 4; ++m) out.at[pair][m] = PartOf(four, m);
    }
    return out;
  }
  // In memory: of one token, for heads 2t and 2t + 1.
  template <int kDim, int kHeads>
  __device__ __forceinline__ static void Put(WarpMemory<kDim, kHeads>& memory, int token,
                                             uint32_t weights) {
    const int t = threadIdx.x % 4, in_strip = token % kStripTokens;
    if (2 * t >= kHeads) return;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      uint4& four = memory.weights[in_strip / 2 % 2][4 * (2 * t + head) + token / kStripTokens];
      reinterpret_cast<uint16_t*>(&four)[in_strip / 4 * 2 + in_strip % 2] =
          static_cast<uint16_t>(weights >> 16 * head);
    }
  }
  // In memory: times the factor of the lane's own head.
  template <int kDim, int kHeads>
  __device__ __forceinline__ static void Scale(WarpMemory<kDim, kHeads>& memory, float factor) {
    const __half2 of_both = __float2half2_rn(factor);
    StripWeights x = Load(memory);
    for (int i = 0; i < 8; ++i)
      x.at[i / 4][i % 4] = BitsOf(__hmul2(HalvesOf(x.at[i / 4][i % 4]), of_both));
    __syncwarp();
    x.Store(memory);
  }

 private:
  // weights: of tokens 4 chunk .. of each g. Of a row of the transpose: tokens 0, 1 (pair 0) and
  // 2, 3 of the strip's even chunk, then of its odd one.
  __device__ __forceinline__ static void Transpose(const uint32_t (&weights)[4],
                                                   uint2 (&pairs)[2]) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Transpose8x8(weights[i]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      pairs[pair] = {LowHalves(x[2 * pair], x[2 * pair + 1]),
                     HighHalves(x[2 * pair], x[2 * pair + 1])};
    }
  }
};

// The largest step of the lane's strip.
template <int kDim, int kHeads>
__device__ __forceinline__ float LargestStep(const WarpMemory<kDim, kHeads>& memory) {
  const uint4* const steps = &memory.value_scales[2 * (threadIdx.x % 4) + kGroupTokens / 8];
  __half2 top = HalvesOf(steps[0].x);
#pragma unroll
  for (int i = 1; i < 8; ++i) top = __hmax2(top, HalvesOf(PartOf(steps[i / 4], i % 4)));
  return fmaxf(__low2float(top), __high2float(top));
}

template <int kDim>
class ValueSums {
 public:
  // Adds the strips that are in memory, with their weights; what was left out weighs 0. ones: 16 of
  // them, fp16.
  template <int kHeads>
  __device__ __forceinline__ void Add(const WarpMemory<kDim, kHeads>& memory, const uint4* ones) {
    Add(memory, StripWeights::Load(memory), ones);
  }
  // memory: has values and value_scales.
  template <typename Memory>
  __device__ __forceinline__ void Add(const Memory& memory, const StripWeights& weights,
                                      const uint4* ones) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4* const minima = &memory.value_scales[2 * t];
    const uint4* const steps = minima + kGroupTokens / 8;
    const uint4* const row = g == 0 ? minima : g == 1 ? steps : ones;
    uint32_t stepped[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t weight = weights.at[i % 2][i / 2];
      const __half2 size = __float2half2_rn(1.0f / static_cast<float>(1 << 2 * (i / 2)));
      const __half2 x = __hmul2(HalvesOf(weight), HalvesOf(PartOf(steps[i / 4], i % 4)));
      stepped[i / 2][i % 2] = i < 2 ? BitsOf(x) : BitsOf(__hmul2(x, size));
    }
    // Four registers that were loaded together are a fragment as they are: rows g count for the
    // first pair of each m, rows g + 8 for the second.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = row[i];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        MmaM16N8K16<__half>(of_tokens_[pair], four.x, four.y, four.z, four.w,
                            weights.at[pair][2 * i], weights.at[pair][2 * i + 1]);
      }
    }
    const uint4* const values = memory.values.Block(t) + g;
#pragma unroll
    for (int k = 0; k < GroupShape<kDim>::kPieces; ++k) {
      const uint4 words = values[8 * k];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint32_t mask = 0x00030003u << 2 * m;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t a = PartOf(words, 2 * pair), b = PartOf(words, 2 * pair + 1);
          MmaM16N8K16<__half>(o_[2 * k + pair], a & mask, b & mask, a >> 8 & mask, b >> 8 & mask,
                              stepped[m][0], stepped[m][1]);
        }
      }
    }
  }

  // Adds what planes 1 and 2 of fine tokens first .. first + 7 of the list say, whose rows are in
  // memory; those that are not there weigh 0. weights: of tokens 2t and 2t + 1 of these for head g.
  // Returns weights times steps.
  template <int kHeads>
  __device__ __forceinline__ float AddLower(const WarpMemory<kDim, kHeads>& memory, int first,
                                            uint32_t weights, const FineForm& form) {
    constexpr int kRun = kDim / 16;  // words of a run
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t* rows[2];
    __half steps[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      steps[i] = memory.ValueStep(memory.fine[first + 2 * t + i] % kGroupTokens);
      rows[i] = reinterpret_cast<const uint32_t*>(memory.rows[2 * t + i]) + form.row_bytes / 8;
    }
    const __half2 stepped = __hmul2(HalvesOf(weights), __halves2half2(steps[0], steps[1]));
    const uint32_t in_sums = BitsOf(__hmul2(stepped, __float2half2_rn(1.0f / 64)));
#pragma unroll
    for (int k = 0; k < GroupShape<kDim>::kPieces; ++k) {
      const int quad = 8 * k + g, m = quad / kRun, word = quad % kRun;
      uint32_t x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t plane2 = form.has_last_plane ? rows[i][kRun + m % 2 * kRun + word] : 0;
        x[i] = LowerCodes(rows[i][word], plane2, m);
      }
      const uint32_t low = LowHalves(x[0], x[1]), high = HighHalves(x[0], x[1]);
      MmaM16N8K8(o_[2 * k], low & kLowerDigits, high & kLowerDigits, in_sums);
      MmaM16N8K8(o_[2 * k + 1], low >> 8 & kLowerDigits, high >> 8 & kLowerDigits, in_sums);
    }
    return __low2float(stepped) + __high2float(stepped);
  }

  // To a warp's sums o, and the sums of weights to l. centre: of the cells of codes. more: what is
  // added to each channel of heads 2t and 2t + 1.
  template <int kHeads>
  __device__ __forceinline__ void Store(float (&o)[kHeads][kDim], float centre,
                                        const float (&more)[2], float (&l)[2]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float own = of_tokens_[0][head] + of_tokens_[1][2 + head];
      const float minima = __shfl_sync(kAllLanes, own, t);
      const float steps = __shfl_sync(kAllLanes, own, 4 + t);
      l[head] = __shfl_sync(kAllLanes, own, 8 + t);
      const float of_all = fmaf(centre, steps, minima) + more[head];
      if (2 * t >= kHeads) continue;
      float* const row = o[2 * t + head];
#pragma unroll
      for (int tile = 0; tile < kDim / 16; ++tile) {
        *reinterpret_cast<float2*>(row + tile / 2 * 32 + 4 * g + tile % 2 * 2) = {
            fmaf(kCode, o_[tile][head], of_all), fmaf(kCode, o_[tile][2 + head], of_all)};
      }
    }
  }

  __device__ __forceinline__ void Scale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) o_[i / 4][i % 4] *= factor[i % 2];
#pragma unroll
    for (int i = 0; i < 8; ++i) of_tokens_[i / 4][i % 4] *= factor[i % 2];
  }

 private:
  static constexpr float kCode = 0x1p30f;  // 64 steps a code, which counts 2^-24 in products
  float o_[kDim / 16][4] = {};             // rows: channels 32k + 4g + 2 pair and the next
  float of_tokens_[2][4] = {};             // rows: weights times minima, times steps, times 1
};

}  // namespace kvstrata::cuda
