// Quantised keys as fragments of the tensor cores' 16x8x16 product: 32 tokens of a group at a time,
// tokens as rows, queries as columns.
//
// Lane 4g + t holds the words kWords t .. kWords t + kWords - 1 of the tokens 4g .. 4g + 3: sixteen
// bytes a word, whose two halves are codes of neighbouring channels. Moved to the top of an fp16's
// mantissa, below the exponent of 2^bits, a code is the number 2^bits + code: a shift, a mask and
// an OR for two of them. The query's sum times 2^bits is taken off beforehand.
#ifndef KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_TILE_CUH_
#define KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_TILE_CUH_

#include <cuda_fp16.h>

#include <cstring>

#include "kernels/cuda/float_bits.cuh"
#include "kernels/cuda/mma_m16n8k16.cuh"
#include "kernels/ops/quantise_keys/device_groups.h"

namespace kvstrata::cuda {

template <int kDim, int kBits>
struct BitsShape {
  static constexpr int kPlaneBits = kBits == 3 ? 2 : kBits;
  static constexpr int kRuns = 8 / kPlaneBits;              // of channels, m of docs/spec/bits.md
  static constexpr int kAllWords = kDim * kPlaneBits / 32;  // of a token in the first plane
  static constexpr int kWords = kAllWords / 4;              // a lane's
  static constexpr int kLaneChannels = 4 * kWords;          // that follow each other, in each run
  static constexpr int kRunChannels = kDim / kRuns;
};

// A pair of halves for each two channels of a lane, in the order of its words: right-hand fragments
// of a query (column g), or what the query is multiplied with.
template <int kDim, int kBits>
struct LanePairs {
  using Shape = BitsShape<kDim, kBits>;
  __half2 at[Shape::kRuns][Shape::kWords][2];

  // From an array [kDim] of fp16.
  __device__ void Load(const char* halves, int t) {
#pragma unroll
    for (int m = 0; m < Shape::kRuns; ++m) {
      const char* from = halves + 2 * (m * Shape::kRunChannels + Shape::kLaneChannels * t);
#pragma unroll
      for (int u = 0; u < Shape::kWords; ++u) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(from + 8 * u);
        memcpy(&at[m][u][0], &pairs, 8);
      }
    }
  }
};

__device__ inline uint32_t BitsOf(__half2 x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// c += rows . query, where every row is `row`.
template <int kDim, int kBits>
__device__ void AddEveryRow(float (&c)[4], const LanePairs<kDim, kBits>& row,
                            const LanePairs<kDim, kBits>& query) {
  using Shape = BitsShape<kDim, kBits>;
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
      const uint32_t low = BitsOf(row.at[m][u][0]), high = BitsOf(row.at[m][u][1]);
      MmaM16N8K16<__half>(c, low, low, high, high, BitsOf(query.at[m][u][0]),
                          BitsOf(query.at[m][u][1]));
    }
  }
}

__device__ inline uint32_t Moved(uint32_t x, int left) {
  return left >= 0 ? x << left : x >> -left;
}

// 2^bits + code of the channels whose codes begin at bit `first` and `first` + 16 of `low`; of
// three bits, the high one at `first_high` of `high`.
template <int kBits>
__device__ inline uint32_t CodePair(uint32_t low, uint32_t high, int first, int first_high) {
  constexpr uint32_t kBoth = 0x00010001, kLowMask = (kBits == 4 ? 15u : 3u) << (10 - kBits);
  constexpr uint32_t kExponent = (kBits + 15) << 10;
  uint32_t pair = (Moved(low, 10 - kBits - first) & kLowMask * kBoth) | kExponent * kBoth;
  if constexpr (kBits == 3) pair |= Moved(high, 9 - first_high) & 0x0200 * kBoth;
  return pair;
}

// A lane's words of 32 tokens.
template <int kDim, int kBits>
struct BitsTile {
  using Shape = BitsShape<kDim, kBits>;
  static constexpr int kHighWords = kBits == 3 ? Shape::kWords : 1;
  uint4 low[Shape::kWords];
  uint4 high[kHighWords];

  // token: the first of the 32 in the group.
  __device__ void Load(const char* group, const GroupOffsets& f, int token, int lane) {
    const int at = token + lane / 4 * 4, t = lane % 4;
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
      const int word = Shape::kWords * t + u;
      low[u] = *reinterpret_cast<const uint4*>(group + f.codes + 4 * (word * f.tokens + at));
      if constexpr (kBits == 3) {
        constexpr int kHalf = Shape::kAllWords / 2;
        high[u] =
            *reinterpret_cast<const uint4*>(group + f.high + 4 * (word % kHalf * f.tokens + at));
        // Every other bit is of the second half's words: theirs move to the places of the first's.
        const int by = word >= kHalf ? 1 : 0;
        high[u] = {high[u].x >> by, high[u].y >> by, high[u].z >> by, high[u].w >> by};
      }
    }
  }

  // c[i] += (2^bits + codes) . query, for the tokens 4g + 2i (c0, c1) and 4g + 2i + 1 (c2, c3).
  __device__ void Multiply(const LanePairs<kDim, kBits>& query, float (&c)[2][4]) const {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
      const uint32_t words[4] = {low[u].x, low[u].y, low[u].z, low[u].w};
      const uint4& bits = high[kBits == 3 ? u : 0];
      const uint32_t highs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int m = 0; m < Shape::kRuns; ++m) {
        const uint32_t b0 = BitsOf(query.at[m][u][0]), b1 = BitsOf(query.at[m][u][1]);
        const int first = Shape::kPlaneBits * m;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a = words[2 * i], b = words[2 * i + 1];
          const uint32_t ha = highs[2 * i], hb = highs[2 * i + 1];
          MmaM16N8K16<__half>(c[i], CodePair<kBits>(a, ha, first, 2 * m),
                              CodePair<kBits>(b, hb, first, 2 * m),
                              CodePair<kBits>(a, ha, first + 8, 2 * m + 8),
                              CodePair<kBits>(b, hb, first + 8, 2 * m + 8), b0, b1);
        }
      }
    }
  }
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_TILE_CUH_
