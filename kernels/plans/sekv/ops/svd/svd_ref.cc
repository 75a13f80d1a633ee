// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/ops/eigen/jacobi.h"
#include "kernels/plans/sekv/ops/svd/svd.h"
#include "kernels/plans/sekv/ops/svd/svd_floor.h"

namespace kvstrata {
namespace {

// One-sided Jacobi (Hestenes): rotates the rows of the shorter side until they are orthogonal.
// Their norms are then the singular values, and no Gram matrix has squared the small ones away.
class OneSided {
 public:
  explicit OneSided(const SvdWork& w)
      : wide_(w.n <= w.dim), m_(std::min(w.n, w.dim)), len_(std::max(w.n, w.dim)) {
    rows_.resize(int64_t{m_} * len_);
    rotations_.assign(int64_t{m_} * m_, 0.0);
    for (int i = 0; i < m_; ++i) {
      rotations_[int64_t{i} * m_ + i] = 1;
      for (int j = 0; j < len_; ++j) {
        rows_[int64_t{i} * len_ + j] =
            wide_ ? w.x[int64_t{i} * w.dim + j] : w.x[int64_t{j} * w.dim + i];
      }
    }
  }

  void Run() {
    for (int sweep = 0; sweep < kJacobiSweepsMax; ++sweep) {
      bool rotated = false;
      for (int p = 0; p < m_; ++p) {
        for (int q = p + 1; q < m_; ++q) rotated |= Rotate(p, q);
      }
      if (!rotated) return;
    }
  }

  void Write(const SvdWork& w) const {
    std::vector<double> norms(m_);
    for (int i = 0; i < m_; ++i) norms[i] = std::sqrt(Dot(i, i));
    std::vector<int> order(m_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return norms[a] > norms[b]; });
    for (int i = 0; i < w.rank; ++i) {
      const double s = norms[order[i]];
      const bool zero = !(s > kSvdFloor * norms[order[0]]);
      w.s[i] = zero ? 0.0f : static_cast<float>(s);
      for (int t = 0; t < w.n; ++t) {
        w.u[int64_t{t} * w.rank + i] = zero ? 0.0f : Component(order[i], t, wide_, s);
      }
      for (int c = 0; c < w.dim; ++c) {
        w.vt[int64_t{i} * w.dim + c] = zero ? 0.0f : Component(order[i], c, !wide_, s);
      }
    }
  }

 private:
  bool Rotate(int p, int q) {
    const double pp = Dot(p, p), pq = Dot(p, q), qq = Dot(q, q);
    if (!(std::fabs(pq) > 0x1p-50 * std::sqrt(pp * qq))) return false;
    const JacobiAngle j = AngleFor(pp, pq, qq);
    ApplyRotation(j, &rows_[int64_t{p} * len_], &rows_[int64_t{q} * len_], len_);
    ApplyRotation(j, &rotations_[int64_t{p} * m_], &rotations_[int64_t{q} * m_], m_);
    return true;
  }

  static void ApplyRotation(const JacobiAngle& j, double* x, double* y, int n) {
    for (int i = 0; i < n; ++i) {
      const double old = x[i];
      x[i] = j.c * old - j.s * y[i];
      y[i] = j.s * old + j.c * y[i];
    }
  }

  // Element i of singular vector k of the short side (a row of rotations_) or of the long one.
  float Component(int k, int i, bool is_short, double s) const {
    return static_cast<float>(is_short ? rotations_[int64_t{k} * m_ + i]
                                       : rows_[int64_t{k} * len_ + i] / s);
  }

  double Dot(int p, int q) const {
    double sum = 0;
    for (int i = 0; i < len_; ++i)
      sum += rows_[int64_t{p} * len_ + i] * rows_[int64_t{q} * len_ + i];
    return sum;
  }

  bool wide_;  // n <= dim: the rows are X's own, else its columns
  int m_, len_;
  std::vector<double> rows_, rotations_;
};

}  // namespace

void SvdRef(const SvdWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    KVS_CHECK(work[i].rank <= std::min(work[i].n, work[i].dim));
    OneSided svd(work[i]);
    svd.Run();
    svd.Write(work[i]);
  });
}

}  // namespace kvstrata
