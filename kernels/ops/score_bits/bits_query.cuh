// SPDX-License-Identifier: Apache-2.0
// Queries of a KV head as right-hand fragments for tiles of quantised keys (bits_tile.cuh), and
// with the scales of a group.
//
// Column g is query g of the group, as fp16. In groups of up to four heads columns 4 .. 7 are what
// a product of query and step leaves when it is rounded, so that column c + column 4 + c has next
// to no error.
#pragma once

#include "kernels/ops/score_bits/bits_tile.cuh"

namespace kvstrata::cuda {

// Four elements of a query as they lie in memory, and as floats. Loads are all asked for before the
// first is looked at: a lane has several, and each waits for the L2. Not through the L1, which in a
// kernel that reads queries before WaitForPrevious may have those of before.
__device__ inline uint4 LoadFour(const void* q, DType dtype, int64_t at) {
  if (dtype == DType::kF32) {
    return __ldcg(reinterpret_cast<const uint4*>(static_cast<const float*>(q) + at));
  }
  const uint2 four = __ldcg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(q) + at));
  return {four.x, four.y, 0, 0};
}
__device__ inline void FourFloats(const uint4& four, DType dtype, float* out) {
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t half = words[e / 2] >> (16 * (e % 2));
    const float of_half = FloatOf(__ushort_as_half(static_cast<uint16_t>(half)));
    const uint32_t of_others = dtype == DType::kF32 ? words[e] : half << 16;  // bf16: the high half
    out[e] = dtype == DType::kF16 ? of_half : __uint_as_float(of_others);
  }
}

// This lane's channels of its column's query, divided by a power of two that leaves none above 1.
// bf16 and fp16 fit but for elements of less than 2^-14 of the largest.
template <int kDim, int kBits>
struct LaneQueryPairs {
  using Shape = BitsShape<kDim, kBits>;
  __half2 at[2][Shape::kRuns * Shape::kWords];  // [channels 0, 1 or 2, 3 of a word][word]
  float unit;                                   // that power

  // first_element: of the group's first query in q.
  __device__ static LaneQueryPairs Load(const void* q, DType dtype, int64_t first_element,
                                        int group) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int query = group > 4 ? lane / 4 : lane / 4 % 4;
    constexpr int kFours = Shape::kLaneChannels / 4;  // groups of four channels in a run
    uint4 fours[Shape::kRuns][kFours] = {};
    if (query < group) {
#pragma unroll
      for (int m = 0; m < Shape::kRuns; ++m) {
        const int64_t at = first_element + int64_t{query} * kDim + m * Shape::kRunChannels +
                           Shape::kLaneChannels * t;
#pragma unroll
        for (int i = 0; i < kFours; ++i) fours[m][i] = LoadFour(q, dtype, at + 4 * i);
      }
    }
    float x[Shape::kRuns][Shape::kLaneChannels];
    float largest = 0;
#pragma unroll
    for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
      for (int i = 0; i < Shape::kLaneChannels; i += 4) {
        FourFloats(fours[m][i / 4], dtype, &x[m][i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[m][i + e]));
      }
    }
    for (int step = 1; step < 4; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    LaneQueryPairs out;
    // 2^e, at least `largest`; a query of less than 2^-100 counts as one of that size.
    const int exponent = largest > 0x1p-100f ? ilogbf(largest) + 1 : -100;
    out.unit = ldexpf(1.0f, exponent);
    const float inverse = ldexpf(1.0f, -exponent);
#pragma unroll
    for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
      for (int i = 0; i < Shape::kLaneChannels; i += 2) {
        out.at[i / 2 % 2][m * Shape::kWords + i / 4] =
            __floats2half2_rn(x[m][i] * inverse, x[m][i + 1] * inverse);
      }
    }
    return out;
  }

  // `scale` times the power of columns 2t and 2t + 1, of which this lane has sums.
  __device__ void Factors(float scale, float (&factor)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = scale * __shfl_sync(~0u, unit, 4 * (2 * (threadIdx.x % 4) + i));
    }
  }
};

// c += what every row of a tile has of the query with these minima: of rows g the columns' shares
// of channels 0, 1 of each word in c0 and c1 of first, of rows g + 8 those of channels 2, 3 in c2
// and c3 of second. The rest of c is of no use: so four registers that were loaded together are a
// left-hand fragment as they are.
template <int kDim, int kBits>
__device__ void AddMinima(const LanePairs<kDim, kBits>& minima,
                          const LaneQueryPairs<kDim, kBits>& query, float (&first)[4],
                          float (&second)[4]) {
  constexpr int kWords = BitsShape<kDim, kBits>::kWords;
#pragma unroll
  for (int i = 0; i < LanePairs<kDim, kBits>::kPairs; i += 2) {
    const __half2 *const low = minima.at[i / kWords][i % kWords],
                         *const high = minima.at[(i + 1) / kWords][(i + 1) % kWords];
    const uint32_t a[4] = {BitsOf(low[0]), BitsOf(low[1]), BitsOf(high[0]), BitsOf(high[1])};
    MmaM16N8K16<__half>(first, a[0], a[1], a[2], a[3], BitsOf(query.at[0][i]),
                        BitsOf(query.at[0][i + 1]));
    MmaM16N8K16<__half>(second, a[0], a[1], a[2], a[3], BitsOf(query.at[1][i]),
                        BitsOf(query.at[1][i + 1]));
  }
}

// c[0] + c[1] -= the sum of 2^exponent times the query, of the numbers that codes become. Two sums,
// since products of one wait for each other.
template <int kDim, int kBits>
__device__ void TakeOffsets(const LanePairs<kDim, kBits>& folded, float (&c)[2][4]) {
  using Shape = BitsShape<kDim, kBits>;
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
    uint32_t offset[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const CodePlace<kBits> place = CodePlace<kBits>::Of(Shape::kPlaneBits * m + 8 * i);
      offset[i] = (static_cast<uint32_t>(place.exponent() + 15) << 10 | 0x8000) * 0x00010001;
    }
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
      MmaM16N8K16<__half>(c[m % 2], offset[0], offset[0], offset[1], offset[1],
                          BitsOf(folded.at[m][u][0]), BitsOf(folded.at[m][u][1]));
    }
  }
}

// The query with a group's scales: what all its tokens have of a sum, in this lane's two columns,
// and in `folded` the query times the steps.
template <int kDim, int kBits>
__device__ void Fold(const char* group_at, const GroupOffsets& f,
                     const LaneQueryPairs<kDim, kBits>& query, int group,
                     LanePairs<kDim, kBits>& folded, float (&base)[2]) {
  using Shape = BitsShape<kDim, kBits>;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool has_rests = group <= 4, is_rest = has_rests && lane >= 16;
  LanePairs<kDim, kBits> scales;
  scales.Load(group_at, t);
  float first[4] = {}, second[4] = {}, offsets[2][4] = {};
  AddMinima(scales, query, first, second);
  scales.Load(group_at + f.step, t);
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __half2 step = scales.at[m][u][i], x = query.at[i][m * Shape::kWords + u];
        __half2 product = __hmul2(step, x);
        if (is_rest) product = __hfma2(step, x, __hneg2(product));
        folded.at[m][u][i] = product;
      }
    }
  }
  TakeOffsets(folded, offsets);
  const bool counts_minima = !has_rests || t < 2;  // columns 4 .. 7 are rests
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    base[i] = offsets[0][i] + offsets[1][i] + (counts_minima ? first[i] + second[2 + i] : 0.0f);
  }
}

}  // namespace kvstrata::cuda
