// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/ops/eigen/jacobi.h"

namespace kvstrata {
namespace {

class Jacobi {
 public:
  explicit Jacobi(const EigenWork& w)
      : n_(w.dim), a_(w.a, w.a + int64_t{w.dim} * w.dim), v_(a_.size(), 0.0) {
    for (int i = 0; i < n_; ++i) v_[int64_t{i} * n_ + i] = 1;
  }

  void Run() {
    double largest = 0;
    for (double x : a_) largest = std::max(largest, std::fabs(x));
    const double done = kJacobiDone * largest;
    for (int sweep = 0; sweep < kJacobiSweepsMax; ++sweep) {
      if (!Sweep(done)) return;
    }
  }

  void Write(const EigenWork& w) const {
    std::vector<double> values(n_);
    for (int i = 0; i < n_; ++i) values[i] = a_[int64_t{i} * n_ + i];
    WriteEigen(w, values.data(), v_.data(), n_);
  }

 private:
  // Whether there was anything left to rotate.
  bool Sweep(double done) {
    bool rotated = false;
    for (int p = 0; p < n_; ++p) {
      for (int q = p + 1; q < n_; ++q) {
        if (!(std::fabs(At(p, q)) > done)) continue;
        Rotate(p, q);
        rotated = true;
      }
    }
    return rotated;
  }

  void Rotate(int p, int q) {
    const double pp = At(p, p), pq = At(p, q), qq = At(q, q);
    const JacobiAngle j = AngleFor(pp, pq, qq);
    for (int i = 0; i < n_; ++i) {
      ApplyRotation(j, At(p, i), At(q, i));
      ApplyRotation(j, v_[int64_t{p} * n_ + i], v_[int64_t{q} * n_ + i]);
    }
    for (int i = 0; i < n_; ++i) At(i, p) = At(p, i), At(i, q) = At(q, i);
    At(p, p) = pp - j.t * pq;
    At(q, q) = qq + j.t * pq;
    At(p, q) = At(q, p) = 0;
  }

  static void ApplyRotation(const JacobiAngle& j, double& x, double& y) {
    const double old = x;
    x = j.c * old - j.s * y;
    y = j.s * old + j.c * y;
  }

  double& At(int i, int j) { return a_[int64_t{i} * n_ + j]; }

  int n_;
  std::vector<double> a_, v_;  // v_: row i is the eigenvector of a_[i][i]
};

// The sign is judged after rounding, so that components that are equal in the result count as
// equal.
void WriteVector(const double* row, int dim, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = static_cast<float>(row[c]);
  int largest = 0;
  for (int c = 1; c < dim; ++c) {
    if (std::fabs(out[c]) > std::fabs(out[largest])) largest = c;
  }
  if (out[largest] >= 0) return;
  for (int c = 0; c < dim; ++c) out[c] = -out[c];
}

}  // namespace

void WriteEigen(const EigenWork& w, const double* values, const double* rows, int64_t stride) {
  std::vector<double> keys(values, values + w.dim);
  for (double& key : keys) {
    if (std::isnan(key)) key = -std::numeric_limits<double>::infinity();  // sorting needs an order
  }
  std::vector<int> order(w.dim);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] > keys[b]; });
  for (int i = 0; i < w.dim; ++i) {
    w.values[i] = values[order[i]];
    WriteVector(rows + order[i] * stride, w.dim, w.vectors + int64_t{i} * w.dim);
  }
}

void EigenRef(const EigenWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    KVS_CHECK(work[i].dim >= 1 && work[i].dim <= 256);
    Jacobi jacobi(work[i]);
    jacobi.Run();
    jacobi.Write(work[i]);
  });
}

}  // namespace kvstrata
