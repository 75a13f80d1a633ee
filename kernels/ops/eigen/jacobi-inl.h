// SPDX-License-Identifier: Apache-2.0
// Jacobi's method in vectors. Included once per Highway target.
//
// A sweep is a round-robin tournament (Brent and Luk): in each of its n - 1 rounds all indices are
// paired, the pairs are rotated at once, and then everybody but the first moves on by one place.
// Pair k stands at place k of the upper half and place k of the lower half, so that both rows and
// columns rotate as whole vectors, and the move is a store one element further.
#if defined(KVSTRATA_KERNELS_OPS_EIGEN_JACOBI_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_EIGEN_JACOBI_INL_H_
#undef KVSTRATA_KERNELS_OPS_EIGEN_JACOBI_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_EIGEN_JACOBI_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "hwy/highway.h"
#include "kernels/ops/eigen/jacobi.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DD = hn::ScalableTag<double>;
using VD = hn::VFromD<DD>;
inline constexpr int kDoubles = static_cast<int>(hn::MaxLanes(DD()));

// Zeros, aligned for vectors.
class Doubles {
 public:
  explicit Doubles(int64_t n) : lines_(std::make_unique<Line[]>(static_cast<size_t>(n + 7) / 8)) {}
  double* data() { return lines_[0].x; }
  const double* data() const { return lines_[0].x; }

 private:
  struct alignas(64) Line {
    double x[8] = {};
  };
  std::unique_ptr<Line[]> lines_;
};

// Eigenvalues and eigenvectors of a symmetric matrix, by index of the matrix's diagonal.
class Jacobi {
 public:
  // a [dim][dim], rows `stride` apart
  Jacobi(const double* a, int dim, int64_t stride)
      : half_((dim + 2 * kDoubles - 1) / (2 * kDoubles) * kDoubles),
        lower_(half_ + kGap),
        stride_(2 * lower_),
        a_(2 * half_ * stride_),
        next_(2 * half_ * stride_),
        vectors_(int64_t{2} * half_ * 2 * half_),
        angles_(int64_t{6} * half_),
        index_(2 * half_) {
    double largest = 0;
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) {
        const double x = a[i * stride + j];
        RowOf(a_, i)[ColumnOf(j)] = x;
        largest = std::max(largest, std::fabs(x));
      }
    }
    done_ = kJacobiDone * largest;
    for (int i = 0; i < 2 * half_; ++i) {
      index_[i] = i;
      vectors_.data()[i * int64_t{2} * half_ + i] = 1;
    }
  }

  void Run() {
    for (int sweep = 0; sweep < kJacobiSweepsMax && AnyLarge(); ++sweep) {
      for (int round = 1; round < 2 * half_; ++round) Round();
    }
  }

  std::vector<double> Values() {
    std::vector<double> values(2 * half_);
    for (int i = 0; i < 2 * half_; ++i) values[index_[i]] = RowOf(a_, i)[ColumnOf(i)];
    return values;
  }

  // Row i belongs to value i.
  const double* vectors() const { return vectors_.data(); }
  int64_t vector_stride() const { return int64_t{2} * half_; }

 private:
  // Elements behind each half of a row: one is pushed out of the upper half to the right, one out
  // of the lower half to the left. A whole cache line keeps both halves aligned.
  static constexpr int kGap = 8;

  int ColumnOf(int place) const { return place < half_ ? place : place - half_ + lower_; }
  double* RowOf(Doubles& matrix, int place) { return matrix.data() + place * int64_t{stride_}; }

  // Where `place` moves to.
  int Moved(int place) const {
    if (place == 0) return 0;
    if (place < half_) return place == half_ - 1 ? 2 * half_ - 1 : place + 1;
    return place == half_ ? 1 : place - 1;
  }

  // Whether anything is left to rotate: cheaper than a sweep that finds nothing.
  bool AnyLarge() {
    for (int i = 0; i < 2 * half_; ++i) {
      for (int j = i + 1; j < 2 * half_; ++j) {
        if (std::fabs(RowOf(a_, i)[ColumnOf(j)]) > done_) return true;
      }
    }
    return false;
  }

  void Round() {
    TakeAngles();
    const double *c = angles_.data(), *s = c + half_;
    for (int k = 0; k < half_; ++k) {
      RotatePair(k, c, s);
      if (s[k] != 0) RotateVectors(k, c[k], s[k]);
    }
    SetDiagonal();
    std::vector<int> moved(index_.size());
    for (int i = 0; i < 2 * half_; ++i) moved[Moved(i)] = index_[i];
    index_.swap(moved);
    std::swap(a_, next_);
  }

  // c, s, and pp, pq, qq of each pair, of which pp and qq are already those after the rotation.
  void TakeAngles() {
    const DD d;
    double *c = angles_.data(), *s = c + half_, *pp = s + half_, *pq = pp + half_, *qq = pq + half_;
    for (int k = 0; k < half_; ++k) {
      pp[k] = RowOf(a_, k)[k];
      pq[k] = RowOf(a_, k)[lower_ + k];
      qq[k] = RowOf(a_, half_ + k)[lower_ + k];
    }
    const VD one = hn::Set(d, 1.0);
    for (int k = 0; k < half_; k += kDoubles) {
      const VD p = hn::Load(d, pp + k), x = hn::Load(d, pq + k), q = hn::Load(d, qq + k);
      const auto rotate = hn::Gt(hn::Abs(x), hn::Set(d, done_));
      // As AngleFor.
      const VD theta = hn::Div(hn::Sub(q, p), hn::Add(x, x));
      const VD root = hn::Sqrt(hn::MulAdd(theta, theta, one));
      const VD size = hn::Div(one, hn::Add(hn::Abs(theta), root));
      const VD t = hn::IfThenElseZero(rotate, hn::CopySign(size, theta));
      const VD cosine = hn::Div(one, hn::Sqrt(hn::MulAdd(t, t, one)));
      hn::Store(cosine, d, c + k);
      hn::Store(hn::Mul(t, cosine), d, s + k);
      hn::Store(hn::NegMulAdd(t, x, p), d, pp + k);
      hn::Store(hn::MulAdd(t, x, q), d, qq + k);
      hn::Store(hn::IfThenZeroElse(rotate, x), d, pq + k);
    }
  }

  // Rows k of both halves, rotated with each other and in all pairs of columns, to where they move.
  void RotatePair(int k, const double* c, const double* s) {
    const DD d;
    const double *upper = RowOf(a_, k), *lower = RowOf(a_, half_ + k);
    double *to_upper = RowOf(next_, Moved(k)), *to_lower = RowOf(next_, Moved(half_ + k));
    const VD ck = hn::Set(d, c[k]), sk = hn::Set(d, s[k]);
    for (int j = 0; j < half_; j += kDoubles) {
      const VD cj = hn::Load(d, c + j), sj = hn::Load(d, s + j);
      const VD uu = hn::Load(d, upper + j), ul = hn::Load(d, upper + lower_ + j);
      const VD lu = hn::Load(d, lower + j), ll = hn::Load(d, lower + lower_ + j);
      const VD a = hn::NegMulAdd(sk, lu, hn::Mul(ck, uu));
      const VD b = hn::NegMulAdd(sk, ll, hn::Mul(ck, ul));
      const VD e = hn::MulAdd(sk, uu, hn::Mul(ck, lu));
      const VD f = hn::MulAdd(sk, ul, hn::Mul(ck, ll));
      hn::StoreU(hn::NegMulAdd(sj, b, hn::Mul(cj, a)), d, to_upper + j + 1);
      hn::StoreU(hn::MulAdd(sj, a, hn::Mul(cj, b)), d, to_upper + lower_ + j - 1);
      hn::StoreU(hn::NegMulAdd(sj, f, hn::Mul(cj, e)), d, to_lower + j + 1);
      hn::StoreU(hn::MulAdd(sj, e, hn::Mul(cj, f)), d, to_lower + lower_ + j - 1);
    }
    MoveEnds(to_upper);
    MoveEnds(to_lower);
  }

  // The three elements that do not move to the neighbouring place of their half.
  void MoveEnds(double* row) const {
    row[0] = row[1];
    row[1] = row[lower_ - 1];
    row[lower_ + half_ - 1] = row[half_];
  }

  void RotateVectors(int k, double c, double s) {
    const DD d;
    const int64_t n = vector_stride();
    double *upper = vectors_.data() + index_[k] * n,
           *lower = vectors_.data() + index_[half_ + k] * n;
    const VD ck = hn::Set(d, c), sk = hn::Set(d, s);
    for (int64_t j = 0; j < n; j += kDoubles) {
      const VD u = hn::Load(d, upper + j), l = hn::Load(d, lower + j);
      hn::Store(hn::NegMulAdd(sk, l, hn::Mul(ck, u)), d, upper + j);
      hn::Store(hn::MulAdd(sk, u, hn::Mul(ck, l)), d, lower + j);
    }
  }

  // What is known without rounding through two rotations.
  void SetDiagonal() {
    const double *pp = angles_.data() + 2 * half_, *pq = pp + half_, *qq = pq + half_;
    for (int k = 0; k < half_; ++k) {
      const int p = Moved(k), q = Moved(half_ + k);
      RowOf(next_, p)[ColumnOf(p)] = pp[k];
      RowOf(next_, q)[ColumnOf(q)] = qq[k];
      RowOf(next_, p)[ColumnOf(q)] = RowOf(next_, q)[ColumnOf(p)] = pq[k];
    }
  }

  int half_;    // places of a half; the matrix is padded with zeros, which never rotate
  int lower_;   // column of the lower half's first place
  int stride_;  // doubles from a row to the next
  double done_ = 0;
  Doubles a_, next_, vectors_, angles_;
  std::vector<int> index_;  // who stands at a place
};

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_EIGEN_JACOBI_INL_H_
