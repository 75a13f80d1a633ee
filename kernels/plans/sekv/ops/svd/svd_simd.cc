// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/plans/sekv/ops/svd/svd_simd.cc"
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/eigen/jacobi-inl.h"
#include "kernels/plans/sekv/ops/svd/svd.h"
#include "kernels/plans/sekv/ops/svd/svd_floor.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

// All in fp64: the Gram matrix squares the singular values, and fp32 would lose those below 1/4000
// of the largest. It is of the shorter side, at most 256, so that only building it reads X.
inline constexpr int kExactMax = 64;
// With the ranks in use (8, 16, 32) a whole number of panels on every target, so that none of them
// sketches with more rows than another.
inline constexpr int kOversampling = 16;
inline constexpr int kGramMultiplications = 3;  // one is the sketch, two are power iterations
inline constexpr int kSvdPanel = 2 * kDoubles;  // columns of a product at a time
inline constexpr int kSvdRows = HWY_TARGET == HWY_AVX3 ? 8 : 4;
inline constexpr int kInner = 128;  // terms of a sum at a time: what they read stays in the L2

int Padded(int n) { return (n + kSvdPanel - 1) / kSvdPanel * kSvdPanel; }

// Zero-padded on both sides.
struct Matrix {
  Matrix(int r, int c) : rows(Padded(r)), columns(Padded(c)), x(int64_t{rows} * columns) {}
  double* Row(int i) { return x.data() + int64_t{i} * columns; }
  const double* Row(int i) const { return x.data() + int64_t{i} * columns; }

  int rows, columns;
  Doubles x;
};

// c[m][j] += sum over k of a[m * a_row + k * a_column] * b[k][j], for kSvdRows by kSvdPanel.
HWY_NOINLINE void MultiplyBlock(const double* a, int64_t a_row, int64_t a_column, const double* b,
                                int64_t b_row, int inner, double* c, int64_t c_row) {
  const DD d;
  VD acc[kSvdRows][2];
#pragma GCC unroll 8
  for (int m = 0; m < kSvdRows; ++m) {
    acc[m][0] = hn::Load(d, c + m * c_row);
    acc[m][1] = hn::Load(d, c + m * c_row + kDoubles);
  }
  for (int k = 0; k < inner; ++k, a += a_column, b += b_row) {
    const VD b0 = hn::Load(d, b), b1 = hn::Load(d, b + kDoubles);
#pragma GCC unroll 8
    for (int m = 0; m < kSvdRows; ++m) {
      const VD am = hn::Set(d, a[m * a_row]);
      acc[m][0] = hn::MulAdd(am, b0, acc[m][0]);
      acc[m][1] = hn::MulAdd(am, b1, acc[m][1]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kSvdRows; ++m) {
    hn::Store(acc[m][0], d, c + m * c_row);
    hn::Store(acc[m][1], d, c + m * c_row + kDoubles);
  }
}

// a b, or a^T b.
Matrix Product(const Matrix& a, bool transposed, const Matrix& b) {
  const int64_t a_row = transposed ? 1 : a.columns, a_column = transposed ? a.columns : 1;
  Matrix c(transposed ? a.columns : a.rows, b.columns);
  for (int k = 0; k < b.rows; k += kInner) {
    const int inner = std::min(kInner, b.rows - k);
    for (int j = 0; j < c.columns; j += kSvdPanel) {
      for (int i = 0; i < c.rows; i += kSvdRows) {
        MultiplyBlock(a.Row(0) + i * a_row + k * a_column, a_row, a_column, b.Row(k) + j, b.columns,
                      inner, c.Row(i) + j, c.columns);
      }
    }
  }
  return c;
}

Matrix Transposed(const Matrix& a) {
  Matrix out(a.columns, a.rows);
  for (int i = 0; i < a.rows; ++i) {
    for (int j = 0; j < a.columns; ++j) out.Row(j)[i] = a.Row(i)[j];
  }
  return out;
}

// X with its shorter side along the rows.
Matrix LongByShort(const SvdWork& w) {
  const bool wide = w.n <= w.dim;
  Matrix z(wide ? w.dim : w.n, wide ? w.n : w.dim);
  for (int t = 0; t < w.n; ++t) {
    const float* row = w.x + int64_t{t} * w.dim;
    for (int c = 0; c < w.dim; ++c) (wide ? z.Row(c)[t] : z.Row(t)[c]) = row[c];
  }
  return z;
}

double Dot(const double* a, const double* b, int n) {
  const DD d;
  VD sum = hn::Zero(d);
  for (int i = 0; i < n; i += kDoubles) {
    sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// y = y * scale + x * by
void Combine(double scale, double by, const double* x, double* y, int n) {
  const DD d;
  const VD vs = hn::Set(d, scale), vb = hn::Set(d, by);
  for (int i = 0; i < n; i += kDoubles) {
    const VD scaled = hn::Mul(vs, hn::Load(d, y + i));
    hn::Store(hn::MulAdd(vb, hn::Load(d, x + i), scaled), d, y + i);
  }
}

// Gram-Schmidt, twice as it must be. Rows that depend on those before become zero.
void Orthonormalize(Matrix& y) {
  const int n = y.columns;
  for (int i = 0; i < y.rows; ++i) {
    double* row = y.Row(i);
    const double before = std::sqrt(Dot(row, row, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (int j = 0; j < i; ++j) Combine(1, -Dot(y.Row(j), row, n), y.Row(j), row, n);
    }
    const double after = std::sqrt(Dot(row, row, n));
    const bool nothing = !(after > 1e-13 * before);
    Combine(nothing ? 0 : 1 / after, 0, row, row, n);
  }
}

// Sums of four uniforms: near enough to a Gaussian for a sketch. The seed is fixed (splitmix64).
void FillSketch(int n, Matrix& y) {
  uint64_t state = 0x6B76737472617461;
  for (int i = 0; i < y.rows; ++i) {
    for (int j = 0; j < n; ++j) {
      uint64_t x = state += 0x9E3779B97F4A7C15;
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
      x ^= x >> 31;
      const uint64_t sum = (x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48);
      y.Row(i)[j] = static_cast<double>(sum) / 0x10000 - 2;
    }
  }
}

// Singular values and vectors of the short side.
struct Spectrum {
  std::vector<double> s;  // [rank]
  Matrix vectors;         // row i belongs to s[i]
};

// Made of the eigenvectors (rows of `basis`, combined by those of `jacobi` where there is a basis).
Spectrum Leading(Jacobi& jacobi, int n, int rank, const Matrix* basis, int columns) {
  std::vector<double> values = jacobi.Values();
  for (double& value : values) value = value > 0 ? value : 0;  // a NaN too
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  Matrix combination(rank, basis != nullptr ? basis->rows : columns);
  std::vector<double> s(rank);
  for (int i = 0; i < rank; ++i) {
    s[i] = std::sqrt(values[order[i]]);
    std::copy_n(jacobi.vectors() + order[i] * jacobi.vector_stride(), n, combination.Row(i));
  }
  if (basis == nullptr) return {std::move(s), std::move(combination)};
  return {std::move(s), Product(combination, false, *basis)};
}

Spectrum Exact(const Matrix& gram, int n, int rank) {
  Jacobi jacobi(gram.Row(0), n, gram.columns);
  jacobi.Run();
  return Leading(jacobi, n, rank, nullptr, n);
}

Spectrum Randomized(const Matrix& gram, int n, int rank) {
  Matrix y(rank + kOversampling, n);
  FillSketch(n, y);
  for (int i = 0; i < kGramMultiplications; ++i) {
    y = Product(y, false, gram);
    Orthonormalize(y);
  }
  const Matrix small = Product(Product(y, false, gram), false, Transposed(y));
  Jacobi jacobi(small.Row(0), y.rows, small.columns);
  jacobi.Run();
  return Leading(jacobi, y.rows, rank, &y, n);
}

void Write(const SvdWork& w, const Spectrum& spectrum, const Matrix& z) {
  const bool wide = w.n <= w.dim;
  const Matrix images =
      Product(z, false, Transposed(spectrum.vectors));  // [long side][rank] times s
  for (int i = 0; i < w.rank; ++i) {
    const double s = spectrum.s[i];
    const bool zero = !(s > kSvdFloor * spectrum.s[0]);
    const double short_scale = zero ? 0 : 1, long_scale = zero ? 0 : 1 / s;
    w.s[i] = zero ? 0.0f : static_cast<float>(s);
    for (int t = 0; t < w.n; ++t) {
      w.u[int64_t{t} * w.rank + i] = static_cast<float>(
          wide ? spectrum.vectors.Row(i)[t] * short_scale : images.Row(t)[i] * long_scale);
    }
    for (int c = 0; c < w.dim; ++c) {
      w.vt[int64_t{i} * w.dim + c] = static_cast<float>(
          wide ? images.Row(c)[i] * long_scale : spectrum.vectors.Row(i)[c] * short_scale);
    }
  }
}

void SvdItem(const SvdWork& w) {
  const int n = std::min(w.n, w.dim);
  KVS_CHECK(w.rank <= n);
  if (w.rank == 0) return;
  const Matrix z = LongByShort(w);
  const Matrix gram = Product(z, true, z);
  const bool exact = n <= kExactMax || Padded(w.rank + kOversampling) >= n;
  Write(w, exact ? Exact(gram, n, w.rank) : Randomized(gram, n, w.rank), z);
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(SvdItem);

void SvdSimd(const SvdWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(SvdItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
