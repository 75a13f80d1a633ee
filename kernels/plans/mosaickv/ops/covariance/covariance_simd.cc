// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/plans/mosaickv/ops/covariance/covariance_simd.cc"
#include <algorithm>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/element.h"
#include "kernels/plans/mosaickv/ops/covariance/covariance.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

// A tile of rows lies in panels of 2N channels, so that a product of two panels reads two streams:
// channel c of row t is x[(c / kPanel * kTileRows + t) * kPanel + c % kPanel].
inline constexpr int kTileRows = 256;
inline constexpr int kPanel = 2 * static_cast<int>(kN);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kChannels = 8;  // channels of one panel at a time, against all of another
#else
inline constexpr int kChannels = 4;
#endif

using DD = hn::ScalableTag<double>;

struct Tile {
  alignas(64) float x[kTileRows * kHeadDimMax];
};

template <typename T>
HWY_INLINE void LoadTile(const PagedRows& rows, int32_t begin, int count, float* x) {
  for (int t = 0; t < count; ++t) {
    const T* row = reinterpret_cast<const T*>(rows.Row(begin + t));
    for (int c = 0; c < rows.dim; c += kPanel) {
      float* to = x + (c / kPanel * kTileRows + t) * kPanel;
      hn::Store(LoadFloats(row + c), DF(), to);
      hn::Store(LoadFloats(row + c + kN), DF(), to + kN);
    }
  }
}

HWY_INLINE void AddTo(VF sum, double* out) {
  const DD d;
  constexpr size_t half = kN / 2;
  const hn::Half<DF> dh;
  hn::StoreU(hn::Add(hn::LoadU(d, out), hn::PromoteTo(d, hn::LowerHalf(dh, sum))), d, out);
  out += half;
  hn::StoreU(hn::Add(hn::LoadU(d, out), hn::PromoteTo(d, hn::UpperHalf(dh, sum))), d, out);
}

// out[m][j] += sum over the rows of a[t][m] * b[t][j].
HWY_NOINLINE void MultiplyPanels(const float* a, const float* b, int rows, int64_t dim,
                                 double* out) {
  const DF d;
  VF acc[kChannels][2];
#pragma GCC unroll 8
  for (int m = 0; m < kChannels; ++m) acc[m][0] = acc[m][1] = hn::Zero(d);
  for (int t = 0; t < rows; ++t, a += kPanel, b += kPanel) {
    const VF b0 = hn::Load(d, b), b1 = hn::Load(d, b + kN);
#pragma GCC unroll 8
    for (int m = 0; m < kChannels; ++m) {
      const VF am = hn::Set(d, a[m]);
      acc[m][0] = hn::MulAdd(am, b0, acc[m][0]);
      acc[m][1] = hn::MulAdd(am, b1, acc[m][1]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kChannels; ++m) {
    AddTo(acc[m][0], out + m * dim);
    AddTo(acc[m][1], out + m * dim + kN);
  }
}

// Panels on and above the diagonal.
HWY_INLINE void AddTile(const float* x, int rows, int dim, double* out) {
  for (int j = 0; j < dim; j += kPanel) {
    for (int i = 0; i < j + kPanel; i += kChannels) {
      MultiplyPanels(x + i / kPanel * kTileRows * kPanel + i % kPanel,
                     x + j / kPanel * kTileRows * kPanel, rows, dim, out + int64_t{i} * dim + j);
    }
  }
}

template <typename T>
HWY_INLINE void Covariance(const CovarianceWork& w) {
  const int dim = w.rows.dim;
  if (!w.accumulate) std::fill(w.out, w.out + int64_t{dim} * dim, 0.0);
  const auto tile = std::make_unique_for_overwrite<Tile>();
  for (int32_t t = w.run.begin; t < w.run.end; t += kTileRows) {
    const int count = std::min(kTileRows, w.run.end - t);
    LoadTile<T>(w.rows, t, count, tile->x);
    AddTile(tile->x, count, dim, w.out);
  }
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < i; ++j) w.out[i * dim + j] = w.out[j * dim + i];
  }
}

void CovarianceItem(const CovarianceWork& w) {
  KVS_CHECK(w.rows.dim % 64 == 0 && w.rows.dim <= kHeadDimMax);
  WithElement(w.rows.dtype, [&]<typename T>() { Covariance<T>(w); });
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(CovarianceItem);

void CovarianceSimd(const CovarianceWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(CovarianceItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
