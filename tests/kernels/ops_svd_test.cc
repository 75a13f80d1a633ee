// SPDX-License-Identifier: Apache-2.0
#include <Eigen/Eigenvalues>

#include "kernels/plans/sekv/ops/svd/svd.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Op = void (*)(const SvdWork*, int64_t, Executor&);

struct Result {
  Matrix u, vt;
  Eigen::VectorXf s;

  Eigen::MatrixXd Product() const {
    return u.cast<double>() * s.cast<double>().asDiagonal() * vt.cast<double>();
  }
};

// Singular values, largest first, from the smaller Gram matrix in double: good to 1e-8 of the
// largest, and a tenth of the compile time of Eigen's own SVD.
Eigen::VectorXd SingularValues(const Eigen::MatrixXd& x) {
  const Eigen::MatrixXd tall = x.rows() < x.cols() ? Eigen::MatrixXd(x.transpose()) : x;
  const Eigen::MatrixXd gram = tall.transpose() * tall;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(gram, Eigen::EigenvaluesOnly);
  return solver.eigenvalues().reverse().cwiseMax(0).cwiseSqrt();
}

Result Compute(Op op, const Matrix& x, int rank) {
  const auto n = static_cast<int32_t>(x.rows()), dim = static_cast<int32_t>(x.cols());
  std::vector<float> u(static_cast<size_t>(n) * rank + 1, kNaN), s(rank + 1, kNaN);
  std::vector<float> vt(static_cast<size_t>(rank) * dim + 1, kNaN);
  u.back() = s.back() = vt.back() = 7;
  const SvdWork work{x.data(), n, dim, rank, u.data(), s.data(), vt.data()};
  op(&work, 1, InlineExecutor());
  EXPECT_EQ(u.back() + s.back() + vt.back(), 21);
  return {Eigen::Map<Matrix>(u.data(), n, rank), Eigen::Map<Matrix>(vt.data(), rank, dim),
          Eigen::Map<Eigen::VectorXf>(s.data(), rank)};
}

class Svd : public SimdTest {
 protected:
  static constexpr Op kOps[] = {SvdRef, SvdSimd};

  Matrix Normal(int rows, int columns) {
    Matrix x(rows, columns);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) x(i, j) = random_.Normal();
    }
    return x;
  }
  Matrix Whole(int rows, int columns) {
    Matrix x(rows, columns);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) x(i, j) = static_cast<float>(random_.Below(7) - 3);
    }
    return x;
  }

  // `slack`: relative error of a singular value; `waste`: by how much the error of the rank-r
  // product may exceed the best one.
  void ExpectSvd(Op op, const Matrix& x, int rank, double slack, double waste) {
    SCOPED_TRACE(std::to_string(x.rows()) + " x " + std::to_string(x.cols()) + " rank " +
                 std::to_string(rank));
    const Eigen::VectorXd best = SingularValues(x.cast<double>());
    const Result r = Compute(op, x, rank);
    for (int i = 0; i < rank; ++i) {
      if (i > 0) {
        EXPECT_GE(r.s[i - 1], r.s[i]);
      }
      EXPECT_NEAR(r.s[i], best[i], slack * best[i] + 1e-6 * best[0]);
    }
    const double tail = best.tail(best.size() - rank).norm();
    EXPECT_LE((x.cast<double>() - r.Product()).norm(), tail * (1 + waste) + 2e-6 * best[0]);
    ExpectOrthogonal(r, rank);
  }

  static void ExpectOrthogonal(const Result& r, int rank) {
    Matrix expected = Matrix::Zero(rank, rank);
    for (int i = 0; i < rank; ++i) expected(i, i) = r.s[i] > 0 ? 1 : 0;
    EXPECT_LE((r.vt * r.vt.transpose() - expected).cwiseAbs().maxCoeff(), 1e-4);
    EXPECT_LE((r.u.transpose() * r.u - expected).cwiseAbs().maxCoeff(), 1e-4);
  }
};

TEST_P(Svd, SmallSidesAreExact) {
  SCOPED_TRACE(random_.Trace());
  for (Op op : kOps) {
    for (int n : {1, 4, 7, 31, 64}) {
      for (int dim : {64, 128, 256}) {
        for (int rank : {1, 3, 32}) {
          ExpectSvd(op, Normal(n, dim), std::min(rank, n), 1e-6, 1e-5);
        }
      }
    }
    ExpectSvd(op, Normal(300, 64), 32, 1e-6, 1e-5);
    ExpectSvd(op, Normal(300, 64), 64, 1e-6, 1e-5);
  }
}

// A flat spectrum is the sketch's worst case: no direction stands out.
TEST_P(Svd, LargeSidesComeCloseToTheBest) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : {128, 256}) {
    for (int n : {100, 333, 700}) {
      ExpectSvd(SvdSimd, Normal(n, dim), 32, 0.15, 0.02);
      Matrix x = Normal(n, dim) * Normal(dim, dim);
      for (int c = 0; c < dim; ++c) x.col(c) *= std::exp(-12.0f * static_cast<float>(c) / dim);
      ExpectSvd(SvdSimd, x, 32, 2e-2, 2e-3);
    }
  }
  ExpectSvd(SvdSimd, Normal(200, 128), 128, 1e-6, 1e-5);  // no room for a sketch: exact
  ExpectSvd(SvdRef, Normal(200, 128), 32, 1e-6, 1e-5);
}

TEST_P(Svd, DeficientRanksGiveZeros) {
  SCOPED_TRACE(random_.Trace());
  for (Op op : kOps) {
    for (auto [n, dim] : {std::pair{20, 128}, {40, 64}, {300, 128}, {100, 256}}) {
      const Matrix x = Whole(n, 5) * Whole(5, dim);
      ExpectSvd(op, x, 16, 1e-5, 0);
      const Result r = Compute(op, x, 16);
      for (int i = 5; i < 16; ++i) {
        EXPECT_EQ(r.s[i], 0);
        EXPECT_TRUE(r.u.col(i).isZero(0));
        EXPECT_TRUE(r.vt.row(i).isZero(0));
      }
    }
    const Result zero = Compute(op, Matrix::Zero(9, 64), 9);
    EXPECT_TRUE(zero.s.isZero(0) && zero.u.isZero(0) && zero.vt.isZero(0));
    const Result large = Compute(op, Matrix::Zero(90, 128), 9);
    EXPECT_TRUE(large.s.isZero(0) && large.u.isZero(0) && large.vt.isZero(0));
  }
}

TEST_P(Svd, TheSameTwiceAndInABatch) {
  const Matrix x = Normal(300, 128);
  const Result a = Compute(SvdSimd, x, 32), b = Compute(SvdSimd, x, 32);
  EXPECT_TRUE(a.u == b.u && a.s == b.s && a.vt == b.vt);
  Result c = b, d = b;
  c.u.setZero(), d.u.setZero();
  const SvdWork work[] = {{x.data(), 300, 128, 32, c.u.data(), c.s.data(), c.vt.data()},
                          {x.data(), 300, 128, 32, d.u.data(), d.s.data(), d.vt.data()}};
  SvdSimd(work, 2, *NewThreadPool(2));
  EXPECT_TRUE(a.u == c.u && a.u == d.u);
}

TEST_P(Svd, NaNsEnd) {
  for (int n : {10, 200}) {
    Matrix x = Normal(n, 128);
    x(3, 5) = kNaN;
    for (Op op : kOps) Compute(op, x, 8);
  }
}

KVS_INSTANTIATE_SIMD(Svd);

}  // namespace
}  // namespace kvstrata
