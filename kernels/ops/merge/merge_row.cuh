// SPDX-License-Identifier: Apache-2.0
// The end of every attention: four channels of one query row, from a partial (m in powers of two)
// and the partials of other ops to its output.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// exp2(m - top), and 0 for an empty part, even if all are.
__device__ __forceinline__ float WeightOf(float m, float top) {
  return m == -INFINITY ? 0.0f : exp2f(m - top);
}

// A sum of rows relative to 2^m.
struct WeightedRow {
  float m = -INFINITY, l = 0;
  float4 o = {0, 0, 0, 0};

  __device__ void Add(float m2, float l2, float4 o2) {
    const float top = fmaxf(m, m2), a = WeightOf(m, top), b = WeightOf(m2, top);
    m = top;
    l = a * l + b * l2;
    o = {a * o.x + b * o2.x, a * o.y + b * o2.y, a * o.z + b * o2.z, a * o.w + b * o2.w};
  }

  // Several at once: their weights do not wait for each other.
  template <int kCount>
  __device__ void Add(const float (&ms)[kCount], const float (&ls)[kCount],
                      const float4 (&os)[kCount]) {
    float top = m;
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = fmaxf(top, ms[i]);
    const float own = WeightOf(m, top);
    m = top;
    l *= own;
    o = {own * o.x, own * o.y, own * o.z, own * o.w};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float w = WeightOf(ms[i], top);
      l = fmaf(w, ls[i], l);
      o = {fmaf(w, os[i].x, o.x), fmaf(w, os[i].y, o.y), fmaf(w, os[i].z, o.z),
           fmaf(w, os[i].w, o.w)};
    }
  }
};

// Adds channels 4 * c .. of `row` (of `rows`) of every part, kAtOnce of which are loaded at a time.
template <int kAtOnce = 1>
__device__ inline void AddParts(const Partials& from, int64_t rows, int64_t row, int dim, int c,
                                WeightedRow& sum) {
#pragma unroll kAtOnce
  for (int part = 0; part < from.parts; ++part) {
    const int64_t at = part * rows + row;
    sum.Add(from.m[at] * kLog2E, from.l[at], reinterpret_cast<const float4*>(from.o + at * dim)[c]);
  }
}

__device__ inline void StoreRow(const AttentionOutput& to, int64_t row, int dim, int c,
                                const WeightedRow& sum) {
  const float scale = sum.l == 0 ? 0.0f : 1.0f / sum.l;
  const float4 x = {sum.o.x * scale, sum.o.y * scale, sum.o.z * scale, sum.o.w * scale};
  const int64_t at = row * (dim / 4) + c;
  if (to.dtype == DType::kF32) {
    static_cast<float4*>(to.rows)[at] = x;
  } else if (to.dtype == DType::kBF16) {
    using E = Element<__nv_bfloat16>;
    static_cast<uint2*>(to.rows)[at] = {E::Pack(x.x, x.y), E::Pack(x.z, x.w)};
  } else {
    using E = Element<__half>;
    static_cast<uint2*>(to.rows)[at] = {E::Pack(x.x, x.y), E::Pack(x.z, x.w)};
  }
  if (c == 0 && to.lse != nullptr) {
    to.lse[row] = sum.l == 0 ? -INFINITY : (sum.m + log2f(sum.l)) * kLn2;
  }
}

// Four channels of query row `row` of `rows`, over all rows that an op attended: with other ops'
// parts to the output, or to the op's own partial where to.rows is null.
__device__ inline void StoreResult(const Partials& with, const AttentionOutput& to,
                                   const Partials& partial, int64_t rows, int64_t row, int dim,
                                   int c, WeightedRow sum) {
  if (to.rows != nullptr) {
    AddParts(with, rows, row, dim, c, sum);
    return StoreRow(to, row, dim, c, sum);
  }
  reinterpret_cast<float4*>(partial.o + row * dim)[c] = sum.o;
  if (c != 0) return;
  partial.m[row] = sum.m * kLn2;
  partial.l[row] = sum.l;
}

}  // namespace kvstrata::cuda
