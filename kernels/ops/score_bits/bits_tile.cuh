// SPDX-License-Identifier: Apache-2.0
// Quantised keys as fragments of the tensor cores' 16x8x16 product: 32 tokens of a group at a time,
// tokens as rows, queries as columns.
//
// Lane 4g + t holds the words kWords t .. kWords t + kWords - 1 of the tokens 4g .. 4g + 3: sixteen
// bytes a word, whose two halves are codes of neighbouring channels. With its lowest bit at bit p
// of an fp16's mantissa, below the exponent of 2^(10 - p), a code is the number 2^(10 - p) + code:
// a mask and an OR for two of them, and two or three shifts of a word (CodePlace). The query's sum
// times 2^(10 - p) is taken off beforehand.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"
#include "kernels/ops/quantise_keys/device_groups.h"

namespace kvstrata::cuda {

template <int kDim, int kBits>
struct BitsShape {
  static constexpr int kPlaneBits = kBits == 3 ? 2 : kBits;
  static constexpr int kRuns = 8 / kPlaneBits;  // runs of channels, m of docs/spec/bits.md
  static constexpr int kAllWords = kDim * kPlaneBits / 32;  // words of a token in the first plane
  static constexpr int kWords = kAllWords / 4;              // a lane's
  static constexpr int kLaneChannels = 4 * kWords;          // that follow each other, in each run
  static constexpr int kRunChannels = kDim / kRuns;
};

// A pair of halves for each two channels of a lane, in the order of its words: right-hand fragments
// of a query (column g), or what the query is multiplied with.
template <int kDim, int kBits>
struct LanePairs {
  using Shape = BitsShape<kDim, kBits>;
  static constexpr int kPairs = Shape::kRuns * Shape::kWords;
  __half2 at[Shape::kRuns][Shape::kWords][2];

  // From an array [kDim] of fp16, which begins at a multiple of 16 bytes.
  __device__ void Load(const char* halves, int t) {
#pragma unroll
    for (int m = 0; m < Shape::kRuns; ++m) {
      const char* from = halves + 2 * (m * Shape::kRunChannels + Shape::kLaneChannels * t);
      if constexpr (Shape::kWords == 1) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(from);
        memcpy(&at[m][0][0], &pairs, 8);
      } else {
#pragma unroll
        for (int u = 0; u < Shape::kWords; u += 2) {
          const uint4 pairs = *reinterpret_cast<const uint4*>(from + 8 * u);
          memcpy(&at[m][u][0], &pairs, 16);
        }
      }
    }
  }
};

__device__ inline uint32_t BitsOf(__half2 x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Where a code goes whose lowest bit is bit `first` of a half word, so that all of it is mantissa.
template <int kBits>
struct CodePlace {
  int left;  // what the word is shifted by
  int bit;   // where the code begins then

  __device__ static constexpr CodePlace Of(int first) {
    const int left = kBits == 3 ? 4 - first / 4 * 4 : first < 4 ? 6 : first + kBits <= 10 ? 0 : -6;
    return {left, first + left};
  }
  __device__ constexpr int exponent() const { return 10 - bit; }  // the number is 2^exponent + code
};

__device__ constexpr uint32_t Moved(uint32_t x, int left) {
  return left >= 0 ? x << left : x >> -left;
}

// x & mask | bits in one instruction: the compiler makes two of it where both are constants.
__device__ inline uint32_t MaskedOr(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
  return out;
}

// 2^exponent + code of the channels whose codes begin at bit `first` and `first` + 16 of `low`; of
// three bits, the high one at the same bit of `high`.
template <int kBits>
__device__ inline uint32_t CodePair(uint32_t low, uint32_t high, int first) {
  constexpr uint32_t kBoth = 0x00010001, kCode = kBits == 4 ? 15 : 3;
  const CodePlace<kBits> place = CodePlace<kBits>::Of(first);
  uint32_t pair = static_cast<uint32_t>(place.exponent() + 15) * 0x0400 * kBoth;
  pair = MaskedOr(Moved(low, place.left), (kCode << place.bit) * kBoth, pair);
  if constexpr (kBits == 3) {
    pair = MaskedOr(Moved(high, place.left + 2), (4u << place.bit) * kBoth, pair);
  }
  return pair;
}

// A lane's words of 32 tokens.
template <int kDim, int kBits>
struct BitsTile {
  using Shape = BitsShape<kDim, kBits>;
  static constexpr int kHighWords = kBits == 3 ? Shape::kWords : 1;
  static constexpr int kPieces = kBits == 3 ? 2 * Shape::kWords : Shape::kWords;  // 16 bytes each
  uint4 low[Shape::kWords];
  uint4 high[kHighWords];

  // Where a lane's words of `low` of the group's first tokens lie in the group, and those of
  // `high`; words follow each other at WordStride, tiles of 32 tokens at kTileStride.
  __device__ static int LowAt(const GroupOffsets& f, int lane) {
    return f.codes + 4 * (Shape::kWords * (lane % 4) * f.tokens + lane / 4 * 4);
  }
  __device__ static int HighAt(const GroupOffsets& f, int lane) {
    return f.high + 4 * (Shape::kWords * (lane % 4) % kHalf * f.tokens + lane / 4 * 4);
  }
  __device__ static int WordStride(const GroupOffsets& f) { return 4 * f.tokens; }
  static constexpr int kTileStride = 128;

  // piece(i): word i of `low`, or word i - kWords of `high`.
  template <typename Piece>
  __device__ void Take(int lane, Piece piece) {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
      low[u] = piece(u);
      if constexpr (kBits == 3) {
        high[u] = piece(Shape::kWords + u);
        // Every other bit is of the second half's words: theirs move to the places of the first's.
        const int by = Shape::kWords * (lane % 4) >= kHalf ? 1 : 0;
        high[u] = {high[u].x >> by, high[u].y >> by, high[u].z >> by, high[u].w >> by};
      }
    }
  }
  // token: the first of the 32 in the group.
  __device__ void Load(const char* group, const GroupOffsets& f, int token, int lane) {
    const int at = token / 32 * kTileStride;
    Take(lane, [&](int i) {
      const int plane = i < Shape::kWords ? LowAt(f, lane) : HighAt(f, lane);
      return *reinterpret_cast<const uint4*>(group + plane + at +
                                             i % Shape::kWords * WordStride(f));
    });
  }

  // c[i] += (2^exponent + codes) . query, for the tokens 4g + 2i (c0, c1) and 4g + 2i + 1 (c2, c3).
  __device__ void Multiply(const LanePairs<kDim, kBits>& query, float (&c)[2][4]) const {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) MultiplyWord(u, query, c);
  }

  // The share of the lanes' words number u.
  __device__ void MultiplyWord(int u, const LanePairs<kDim, kBits>& query, float (&c)[2][4]) const {
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
        MmaM16N8K16<__half>(c[i], CodePair<kBits>(a, ha, first), CodePair<kBits>(b, hb, first),
                            CodePair<kBits>(a, ha, first + 8), CodePair<kBits>(b, hb, first + 8),
                            b0, b1);
      }
    }
  }

 private:
  static constexpr int kHalf = Shape::kAllWords / 2;
};

}  // namespace kvstrata::cuda
