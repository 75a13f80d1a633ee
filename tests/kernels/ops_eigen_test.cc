// SPDX-License-Identifier: Apache-2.0
#include <Eigen/Eigenvalues>

#include "kernels/ops/eigen/eigen.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Op = void (*)(const EigenWork*, int64_t, Executor&);

struct Result {
  Eigen::VectorXd values;
  Matrix vectors;  // rows
};

Result Compute(Op op, const Matrix& a) {
  const auto n = static_cast<int32_t>(a.rows());
  std::vector<double> values(n + 1, kNaN);
  std::vector<float> vectors(static_cast<size_t>(n) * n + 1, kNaN);
  values[n] = 7, vectors.back() = 7;
  const Matrix before = a;
  const EigenWork work{a.data(), n, values.data(), vectors.data()};
  op(&work, 1, InlineExecutor());
  EXPECT_TRUE(a == before || a.hasNaN());
  EXPECT_EQ(values[n], 7);
  EXPECT_EQ(vectors.back(), 7);
  return {Eigen::Map<Eigen::VectorXd>(values.data(), n),
          Eigen::Map<Eigen::Matrix<float, -1, -1, Eigen::RowMajor>>(vectors.data(), n, n)
              .cast<double>()};
}

class EigenTest : public SimdTest {
 protected:
  static constexpr Op kOps[] = {EigenRef, EigenSimd};

  Matrix Random(int rows, int columns) {
    Matrix x(rows, columns);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) x(i, j) = random_.Normal();
    }
    return x;
  }
  // X^T X of rows whose channels shrink: what covariances of keys look like.
  Matrix Covariance(int dim, int rows, double decay) {
    Matrix x = Random(rows, dim) * Random(dim, dim);
    for (int c = 0; c < dim; ++c) x.col(c) *= std::exp(-decay * c / dim);
    return x.transpose() * x;
  }

  void ExpectEigen(const Matrix& a) {
    SCOPED_TRACE(std::to_string(a.rows()));
    const Eigen::SelfAdjointEigenSolver<Matrix> truth(a);
    const double largest = truth.eigenvalues().cwiseAbs().maxCoeff();
    for (Op op : kOps) {
      const Result r = Compute(op, a);
      const Eigen::VectorXd expected = truth.eigenvalues().reverse();
      EXPECT_LE((r.values - expected).cwiseAbs().maxCoeff(), 1e-12 * largest);
      const Matrix unit = r.vectors * r.vectors.transpose();
      EXPECT_LE((unit - Matrix::Identity(a.rows(), a.rows())).cwiseAbs().maxCoeff(), 2e-6);
      const Matrix residual = r.vectors * a - r.values.asDiagonal() * r.vectors;
      EXPECT_LE(residual.cwiseAbs().maxCoeff(), 2e-6 * largest);
      for (int i = 0; i < a.rows(); ++i) {
        if (i > 0) {
          EXPECT_GE(r.values[i - 1], r.values[i]);
        }
        Eigen::Index first = 0;  // maxCoeff finds the first of equal ones
        r.vectors.row(i).cwiseAbs().maxCoeff(&first);
        EXPECT_GT(r.vectors(i, first), 0);
      }
    }
  }
};

TEST_P(EigenTest, LikeTheEigenLibraryAtEveryDim) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : {1, 2, 3, 7, 16, 17, 64, 128}) {
    ExpectEigen(Covariance(dim, 4 * dim, 0));
    ExpectEigen(Covariance(dim, 4 * dim, 8));
    const Matrix x = Random(dim, dim);
    ExpectEigen(x + Matrix(x.transpose()));
  }
  ExpectEigen(Covariance(256, 500, 4));
}

TEST_P(EigenTest, RankDeficientAndHugeAndTinyMatrices) {
  SCOPED_TRACE(random_.Trace());
  ExpectEigen(Covariance(128, 20, 0));
  ExpectEigen(Covariance(64, 100, 2) * 1e200);
  ExpectEigen(Covariance(64, 100, 2) * 1e-100);
}

// Vectors of distant eigenvalues are unique, so both backends must find the same.
TEST_P(EigenTest, SameVectorsAsRef) {
  SCOPED_TRACE(random_.Trace());
  Eigen::HouseholderQR<Matrix> qr(Random(128, 128));
  const Matrix q = qr.householderQ();
  Eigen::VectorXd values(128);
  for (int i = 0; i < 128; ++i) values[i] = 200 - i;
  const Matrix a = q * values.asDiagonal() * q.transpose();
  const Matrix symmetric = (a + a.transpose()) / 2;
  const Result ref = Compute(EigenRef, symmetric), simd = Compute(EigenSimd, symmetric);
  EXPECT_LE((ref.vectors - simd.vectors).cwiseAbs().maxCoeff(), 1e-6);
}

TEST_P(EigenTest, EqualEigenvaluesKeepTheOrderOfTheDiagonal) {
  for (Op op : kOps) {
    const Result same = Compute(op, Matrix::Identity(64, 64) * 3);
    EXPECT_TRUE(same.vectors == Matrix::Identity(64, 64));
    const Result zero = Compute(op, Matrix::Zero(5, 5));
    EXPECT_TRUE(zero.vectors == Matrix::Identity(5, 5));
    Eigen::VectorXd diagonal(4);
    diagonal << 1, 2, 1, -2;
    const Result four = Compute(op, diagonal.asDiagonal());
    EXPECT_EQ(four.vectors(0, 1), 1);
    EXPECT_EQ(four.vectors(1, 0), 1);
    EXPECT_EQ(four.vectors(2, 2), 1);
    EXPECT_EQ(four.vectors(3, 3), 1);
  }
}

// The first component of (1, -1) / sqrt(2) is the positive one, however its last bit fell.
TEST_P(EigenTest, OfEqualComponentsTheFirstIsPositive) {
  Matrix a(2, 2);
  a << 1, -3, -3, 1;
  for (Op op : kOps) {
    const Result r = Compute(op, a);
    EXPECT_DOUBLE_EQ(r.values[0], 4);
    EXPECT_GT(r.vectors(0, 0), 0);
    EXPECT_LT(r.vectors(0, 1), 0);
    EXPECT_GT(r.vectors(1, 0), 0);
  }
}

TEST_P(EigenTest, NaNsEnd) {
  Matrix a = Covariance(64, 100, 0);
  a(3, 5) = a(5, 3) = kNaN;
  for (Op op : kOps) Compute(op, a);
  a(3, 5) = a(5, 3) = kInf;
  for (Op op : kOps) Compute(op, a);
}

KVS_INSTANTIATE_SIMD(EigenTest);

}  // namespace
}  // namespace kvstrata
