// SPDX-License-Identifier: Apache-2.0
// Coarse logits of a group of 64 tokens by a whole warp: plane 0 of its keys on tensor cores.
//
// A code that is left at its bit 2m of a half word is the subnormal fp16 of 2^-24 4^m times it,
// which products take as it is. So a word of 16 codes becomes eight registers of a left-hand
// fragment by a shift and eight masks; what it is multiplied with, query times step, has 64 / 4^m
// in it.
#pragma once

#include "kernels/cuda/warps/mma_m16n8k8.cuh"
#include "kernels/ops/attend_planes/planes_item.cuh"
#include "kernels/ops/merge/merge_row.cuh"
#include "kernels/ops/score_bits/bits_query.cuh"

namespace kvstrata::cuda {

// What makes logits, times log2(e), of a lane's two heads: those of columns 2t and 2t + 1.
struct LaneFactors {
  float base[2];  // for sums over plain queries
  float code[2];  // for sums over codes
};

// The queries of a KV head as right-hand fragments, for all warps of a CTA: four registers of a
// lane together, those of two words of codes.
template <int kDim>
struct SharedQuery {
  static constexpr int kQuads = GroupShape<kDim>::kQuads;
  // Divided by a power of two so that none is above 1: first pairs of both words, then second ones.
  uint4 plain[kQuads][32];
  uint4 scaled[kQuads][32];  // times 64 / 4^m
  float base[8];             // each column's, as LaneFactors has it

  // By one warp. scale: of logits, times log2(e).
  __device__ void Store(const LaneQueryPairs<kDim, 2>& query, float scale) {
    constexpr int kWords = GroupShape<kDim>::kWords;
    const int lane = threadIdx.x % 32;
    if (lane % 4 == 0) base[lane / 4] = scale * query.unit;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      uint32_t x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = 2 * quad + i / 2, m = word / kWords;
        const __half2 pair = query.at[i % 2][word];
        x[i] = BitsOf(pair);
        y[i] = BitsOf(__hmul2(pair, __float2half2_rn(static_cast<float>(64 >> 2 * m))));
      }
      plain[quad][lane] = {x[0], x[2], x[1], x[3]};
      scaled[quad][lane] = {y[0], y[1], y[2], y[3]};
    }
  }

  __device__ LaneFactors Factors() const {
    const float* const of_lane = base + 2 * (threadIdx.x % 4);
    return {{of_lane[0], of_lane[1]}, {of_lane[0] * 0x1p24f, of_lane[1] * 0x1p24f}};
  }
};

__device__ __forceinline__ uint32_t PartOf(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ __half2 HalvesOf(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, 4);
  return pair;
}

// Query times the steps of a group.
template <int kDim>
__device__ __forceinline__ void FoldSteps(const KeyScales<kDim>& scales,
                                          const SharedQuery<kDim>& query,
                                          LanePairs<kDim, 2>& folded) {
  constexpr int kWords = GroupShape<kDim>::kWords;
  folded.Load(scales.Steps(), threadIdx.x % 4);
#pragma unroll
  for (int quad = 0; quad < SharedQuery<kDim>::kQuads; ++quad) {
    const uint4 four = query.scaled[quad][threadIdx.x % 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = 2 * quad + i / 2;
      __half2& step = folded.at[word / kWords][word % kWords][i % 2];
      step = __hmul2(step, HalvesOf(PartOf(four, i)));
    }
  }
}

// A lane's sums. Token 4 L + i of the lane's: c[L][i / 2][2 (i % 2)] for head 2t, and the number
// after it for head 2t + 1. Over channels: query times minima, query times steps, and 4096 times
// the squares of the latter.
struct GroupSums {
  float c[2][2][4];
  float minima[2], steps[2], squares[2];

  // What is added to `code` times c[..]. centre: of the cells of codes.
  __device__ float Base(const LaneFactors& factors, int head, float centre) const {
    return factors.base[head] * fmaf(centre, steps[head], minima[head]);
  }
  __device__ float Of(int token, int head) const {
    return c[token / 4][token % 4 / 2][2 * (token % 2) + head];
  }
};

// Sums that a lane goes on with, of tokens first() .. first() + kCount - 1 of its own. Of four
// heads lanes t + 2 have the same sums as lanes t, so each takes half of the tokens.
template <int kHeads>
struct OwnSums {
  static constexpr int kCount = kHeads == 4 ? 4 : 8;
  float at[kCount][2];  // [token][head 2t or 2t + 1, of kHeads]

  __device__ explicit OwnSums(const GroupSums& sums) {
    const bool is_second = first() != 0;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const float low = sums.Of(i / 2, i % 2);
      at[i / 2][i % 2] = is_second ? sums.Of(8 - kCount + i / 2, i % 2) : low;
    }
  }
  __device__ static int first() { return kHeads == 4 ? threadIdx.x % 4 / 2 * 4 : 0; }

  __device__ float Top(int head) const {
    float top = at[0][head];
#pragma unroll
    for (int i = 1; i < kCount; ++i) top = fmaxf(top, at[i][head]);
    return top;
  }
  // The same without tokens that have a bit, of the lane's eight.
  __device__ float Top(int head, uint32_t left_out) const {
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((left_out >> first() >> i & 1) == 0) top = fmaxf(top, at[i][head]);
    }
    return top;
  }
};

// 16 codes of two tokens, field m of word a in row g and of word b in row g + 8.
__device__ __forceinline__ void MultiplyField(float (&c)[4], uint32_t a, uint32_t b, int m,
                                              const __half2 (&query)[2]) {
  const uint32_t mask = 0x00030003u << 2 * m;
  MmaM16N8K16<__half>(c, a & mask, b & mask, a >> 8 & mask, b >> 8 & mask, BitsOf(query[0]),
                      BitsOf(query[1]));
}

// Sums over channels of query times minima and query times steps. Registers that were loaded
// together are a left-hand fragment as they are: rows g count in products with the first pairs of
// words, rows g + 8 in those with the second. Even rows are minima, odd ones steps.
template <int kDim>
__device__ __forceinline__ void SumOverChannels(const KeyScales<kDim>& scales,
                                                const SharedQuery<kDim>& query, GroupSums& sums) {
  constexpr int kWords = GroupShape<kDim>::kWords;
  const bool has_minima = threadIdx.x / 4 % 2 == 0;
  LanePairs<kDim, 2> x;
  x.Load(has_minima ? scales.Minima() : scales.Steps(), threadIdx.x % 4);
  float c[2][4] = {};
#pragma unroll
  for (int quad = 0; quad < SharedQuery<kDim>::kQuads; ++quad) {
    const uint4 four = query.plain[quad][threadIdx.x % 32];
    const int word = 2 * quad;
    const __half2 *const a = x.at[word / kWords][word % kWords],
                         *const b = x.at[(word + 1) / kWords][(word + 1) % kWords];
    MmaM16N8K16<__half>(c[0], BitsOf(a[0]), BitsOf(a[1]), BitsOf(b[0]), BitsOf(b[1]), four.x,
                        four.y);
    MmaM16N8K16<__half>(c[1], BitsOf(a[0]), BitsOf(a[1]), BitsOf(b[0]), BitsOf(b[1]), four.z,
                        four.w);
  }
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const float own = c[0][head] + c[1][2 + head];
    const float other = __shfl_xor_sync(kAllLanes, own, 4);
    sums.minima[head] = has_minima ? own : other;
    sums.steps[head] = has_minima ? other : own;
  }
}

// Sums of squares of the query times steps: a head's is in the diagonal of the matrix of both times
// itself. Rows g take the first pairs, rows g + 8 the second ones; what else comes of these
// products is of no use. Runs m have 4^-m in them.
template <int kDim>
__device__ __forceinline__ void SumSquares(const LanePairs<kDim, 2>& folded, GroupSums& sums) {
  float first[4] = {}, second[4] = {};
#pragma unroll
  for (int m = 3; m >= 0; --m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] *= 16;
      second[2 + i] *= 16;
    }
#pragma unroll
    for (int u = 0; u < GroupShape<kDim>::kWords; ++u) {
      const uint32_t x = BitsOf(folded.at[m][u][0]), y = BitsOf(folded.at[m][u][1]);
      MmaM16N8K8(first, x, y, x);
      MmaM16N8K8(second, x, y, y);
    }
  }
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    sums.squares[head] = __shfl_sync(kAllLanes, first[head] + second[2 + head], 9 * t + 4 * head);
  }
}

// Group `number` of those that the warp takes. Its copies are complete.
template <int kDim, int kHeads>
__device__ __forceinline__ void ScoreGroup(const WarpMemory<kDim, kHeads>& memory, int number,
                                           const SharedQuery<kDim>& query, GroupSums& sums) {
  using Shape = GroupShape<kDim>;
  const uint4* const codes = memory.codes[number % 2].Block(threadIdx.x % 4) + KeyPiece();
  const KeyScales<kDim>& scales = memory.scales[number % 4];
  uint4 words[2][Shape::kWords];
#pragma unroll
  for (int i = 0; i < 2 * Shape::kWords; ++i) words[i % 2][i / 2] = codes[16 * (i / 2) + i % 2 * 2];
  SumOverChannels(scales, query, sums);
  LanePairs<kDim, 2> folded;
  FoldSteps(scales, query, folded);
  SumSquares<kDim>(folded, sums);
#pragma unroll
  for (int i = 0; i < 16; ++i) sums.c[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
  for (int u = 0; u < Shape::kWords; ++u) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint4& four = words[tile / 2][u];
        MultiplyField(sums.c[tile / 2][tile % 2], PartOf(four, 2 * (tile % 2)),
                      PartOf(four, 2 * (tile % 2) + 1), m, folded.at[m][u]);
      }
    }
  }
}

}  // namespace kvstrata::cuda
