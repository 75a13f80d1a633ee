// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack_simd.cc"
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/element.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/choose-inl.h"
#include "kernels/plans/mosaickv/ops/rotate_pack/rotate_pack.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

inline constexpr int kTileRows = 48;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kBlockRows = 12;  // times two vectors: 24 of 32 registers are sums
#else
inline constexpr int kBlockRows = 6;
#endif
inline constexpr int kPanel = 2 * static_cast<int>(kN);
static_assert(kTileRows % kBlockRows == 0);

using DD = hn::ScalableTag<double>;

// Scratch for one item.
struct Workspace {
  alignas(64) float x[kTileRows * kHeadDimMax];  // rows, or sums of blocks of rows
  alignas(64) float rotated[kTileRows * kHeadDimMax];
  // R^T in panels of 2N columns: what multiplies a row's channel k lies together.
  alignas(64) float panels[kHeadDimMax * kHeadDimMax];
  int32_t guess = 0x3F800000;  // where the last row's choice was cut
};

HWY_INLINE void MakePanels(const float* r, int dim, int columns, float* panels) {
  for (int p = 0; p < columns; p += kPanel, panels += dim * kPanel) {
    for (int k = 0; k < dim; ++k) {
      for (int j = 0; j < kPanel; ++j) panels[k * kPanel + j] = r[int64_t{p + j} * dim + k];
    }
  }
}

// kBlockRows rows by one panel: out[m][j] = sum over k of x[m][k] * panel[k][j].
HWY_NOINLINE void MultiplyPanel(const float* x, const float* panel, int dim, float* out) {
  const DF d;
  VF acc[kBlockRows][2];
#pragma GCC unroll 12
  for (int m = 0; m < kBlockRows; ++m) acc[m][0] = acc[m][1] = hn::Zero(d);
  for (int k = 0; k < dim; ++k, panel += kPanel) {
    const VF b0 = hn::Load(d, panel), b1 = hn::Load(d, panel + kN);
#pragma GCC unroll 12
    for (int m = 0; m < kBlockRows; ++m) {
      const VF a = hn::Set(d, x[m * dim + k]);
      acc[m][0] = hn::MulAdd(a, b0, acc[m][0]);
      acc[m][1] = hn::MulAdd(a, b1, acc[m][1]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < kBlockRows; ++m) {
    hn::Store(acc[m][0], d, out + m * dim);
    hn::Store(acc[m][1], d, out + m * dim + kN);
  }
}

// The first `columns` channels of x' of the tile's rows.
HWY_INLINE void RotateTile(int rows, int dim, int columns, Workspace& ws) {
  const int padded = (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  std::fill(ws.x + rows * dim, ws.x + padded * dim, 0.0f);
  for (int p = 0; p < columns; p += kPanel) {
    for (int i = 0; i < padded; i += kBlockRows) {
      MultiplyPanel(ws.x + i * dim, ws.panels + p * dim, dim, ws.rotated + i * dim + p);
    }
  }
}

template <typename T>
HWY_INLINE void LoadRow(const std::byte* from, int dim, float* x) {
  const T* row = reinterpret_cast<const T*>(from);
  for (int c = 0; c < dim; c += kN) hn::Store(LoadFloats(row + c), DF(), x + c);
}

template <typename T>
HWY_INLINE void AddRow(const std::byte* from, int dim, float* x) {
  const T* row = reinterpret_cast<const T*>(from);
  for (int c = 0; c < dim; c += kN) {
    hn::Store(hn::Add(hn::Load(DF(), x + c), LoadFloats(row + c)), DF(), x + c);
  }
}

// In fp64: what was kept may be nearly all, and a relative error is the root of the difference.
HWY_INLINE double SumOfSquares(const float* x, int n) {
  const DD d;
  const hn::Rebind<float, DD> df;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(DD()));
  auto a = hn::Zero(d), b = hn::Zero(d);
  for (int c = 0; c < n; c += 2 * lanes) {
    const auto x0 = hn::PromoteTo(d, hn::LoadU(df, x + c));
    const auto x1 = hn::PromoteTo(d, hn::LoadU(df, x + c + lanes));
    a = hn::MulAdd(x0, x0, a);
    b = hn::MulAdd(x1, x1, b);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(a, b)));
}

struct Loss {
  double energy = 0, kept = 0, relative_error = 0;

  void Add(double all, double part) {
    energy += all;
    kept += part;
    if (all != 0) relative_error += std::sqrt(std::max(0.0, 1 - part / all));
  }
};

template <typename T>
HWY_INLINE void PackRows(const RotatePackWork& w, Workspace& ws) {
  const int dim = w.rows.dim;
  const bool losses = w.energy != nullptr || w.kept != nullptr || w.relative_error != nullptr;
  // Truncated channels count in a loss only.
  const int columns = losses ? dim : w.format.bits * w.format.neighbours;
  Loss loss;
  std::byte* out = w.out;
  alignas(64) float kept[kHeadDimMax + 2 * kN];
  MakePanels(w.r, dim, (columns + kPanel - 1) / kPanel * kPanel, ws.panels);
  for (int32_t t = w.run.begin; t < w.run.end; t += kTileRows) {
    const int count = std::min(kTileRows, w.run.end - t);
    for (int i = 0; i < count; ++i) LoadRow<T>(w.rows.Row(t + i), dim, ws.x + i * dim);
    RotateTile(count, dim, columns, ws);
    for (int i = 0; i < count; ++i, out += w.format.stride) {
      const float* x = ws.rotated + i * dim;
      PackRow(x, w.format, ws.guess, kept, out);
      if (losses) loss.Add(SumOfSquares(x, dim), SumOfSquares(kept, w.format.keep));
    }
  }
  if (w.energy != nullptr) *w.energy = loss.energy;
  if (w.kept != nullptr) *w.kept = loss.kept;
  if (w.relative_error != nullptr) *w.relative_error = loss.relative_error;
}

// A sum of rotated rows is the rotated sum of the rows: one rotation a block instead of one a row.
template <typename T>
HWY_INLINE void PackBlocks(const RotatePackWork& w, Workspace& ws) {
  const int dim = w.rows.dim, columns = w.format.bits * w.format.neighbours;
  std::byte* out = w.out;
  alignas(64) float kept[kHeadDimMax + 2 * kN];
  MakePanels(w.r, dim, (columns + kPanel - 1) / kPanel * kPanel, ws.panels);
  int32_t t = w.run.begin;
  while (t < w.run.end) {
    int sizes[kTileRows], count = 0;
    for (; count < kTileRows && t < w.run.end; ++count, t += w.block) {
      sizes[count] = std::min(w.block, w.run.end - t);
      LoadRow<T>(w.rows.Row(t), dim, ws.x + count * dim);
      for (int i = 1; i < sizes[count]; ++i) AddRow<T>(w.rows.Row(t + i), dim, ws.x + count * dim);
    }
    RotateTile(count, dim, columns, ws);
    for (int b = 0; b < count; ++b, out += w.format.stride) {
      float* x = ws.rotated + b * dim;
      const VF size = hn::Set(DF(), static_cast<float>(sizes[b]));
      for (int c = 0; c < dim; c += kN) {
        hn::Store(hn::Div(hn::Load(DF(), x + c), size), DF(), x + c);
      }
      PackRow(x, w.format, ws.guess, kept, out);
    }
  }
}

template <typename T>
HWY_INLINE void RotatePackTyped(const RotatePackWork& w) {
  const auto ws = std::make_unique_for_overwrite<Workspace>();
  return w.block > 0 ? PackBlocks<T>(w, *ws) : PackRows<T>(w, *ws);
}

void RotatePackItem(const RotatePackWork& w) {
  const PackedRows& f = w.format;
  KVS_CHECK(f.dim == w.rows.dim && f.dim % 64 == 0 && f.dim <= kHeadDimMax);
  KVS_CHECK(f.bits * f.neighbours <= f.dim);
  KVS_CHECK(f.keep % f.neighbours == 0 && f.keep <= f.bits * f.neighbours);
  WithElement(w.rows.dtype, [&]<typename T>() { RotatePackTyped<T>(w); });
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(RotatePackItem);

void RotatePackSimd(const RotatePackWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(RotatePackItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
