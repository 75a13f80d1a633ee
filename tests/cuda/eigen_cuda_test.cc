// SPDX-License-Identifier: Apache-2.0
// eigen on the GPU against ref, on fresh random matrices; outputs and workspace are NaN before.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/eigen/eigen.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

// X^T X of `rows` rows whose channels fall by `decay` each.
std::vector<double> Gram(Rng& rng, int dim, int rows, double decay) {
  const auto d = static_cast<size_t>(dim);
  std::vector<double> a(d * d), x(d);
  for (int r = 0; r < rows; ++r) {
    double mixed = 0;
    for (size_t c = 0; c < d; ++c) {
      mixed = 0.5 * mixed + Normal(rng);
      x[c] = mixed * std::pow(decay, static_cast<double>(c));
    }
    for (size_t i = 0; i < d; ++i) {
      for (size_t j = 0; j < d; ++j) a[i * d + j] += x[i] * x[j];
    }
  }
  return a;
}

struct Eigen {
  std::vector<float> values, vectors;
};

std::vector<Eigen> OnDevice(int dim, const std::vector<std::vector<double>>& matrices) {
  const auto d = static_cast<size_t>(dim);
  std::vector<DeviceArray<double>> a;
  std::vector<DeviceArray<float>> values, vectors;
  std::vector<EigenItem> items;
  for (const auto& matrix : matrices) {
    a.emplace_back(matrix);
    values.emplace_back(d);
    vectors.emplace_back(d * d);
    items.push_back({a.back().address(), values.back().address(), vectors.back().address()});
  }
  const DeviceArray<EigenItem> device_items(items);
  EigenBatch work{dim, device_items.get(), static_cast<int32_t>(items.size()), nullptr};
  const DeviceArray<float> workspace(
      static_cast<size_t>(kvs_cuda_ops()->eigen_workspace_bytes(work)) / 4);
  work.workspace = workspace.get();
  EXPECT_EQ(kvs_cuda_ops()->eigen(work, nullptr), 0);
  std::vector<Eigen> out;
  for (size_t i = 0; i < items.size(); ++i) out.push_back({values[i].Read(), vectors[i].Read()});
  return out;
}

// Largest |R A R^T - diag(values)| and |R R^T - 1|, the first in units of the largest value.
struct Errors {
  double diagonal = 0, orthogonal = 0;
};

Errors ErrorsOf(size_t d, const std::vector<double>& a, const Eigen& e) {
  std::vector<double> ra(d * d);
  for (size_t i = 0; i < d; ++i) {
    for (size_t k = 0; k < d; ++k) {
      const double r = e.vectors[i * d + k];
      for (size_t j = 0; j < d; ++j) ra[i * d + j] += r * a[k * d + j];
    }
  }
  Errors errors;
  const auto worse = [](double& worst, double x) {
    worst = std::isnan(x) ? 1e9 : std::max(worst, std::fabs(x));
  };
  for (size_t i = 0; i < d; ++i) {
    for (size_t j = 0; j < d; ++j) {
      double rar = 0, rr = 0;
      for (size_t k = 0; k < d; ++k) {
        rar += ra[i * d + k] * e.vectors[j * d + k];
        rr += double{e.vectors[i * d + k]} * e.vectors[j * d + k];
      }
      worse(errors.diagonal, rar - (i == j ? double{e.values[i]} : 0));
      worse(errors.orthogonal, rr - (i == j ? 1 : 0));
    }
  }
  if (e.values[0] > 0) errors.diagonal /= double{e.values[0]};
  return errors;
}

void ExpectSignsFixed(size_t d, const std::vector<float>& vectors) {
  for (size_t i = 0; i < d; ++i) {
    const float* row = &vectors[i * d];
    size_t largest = 0;
    for (size_t c = 1; c < d; ++c) {
      if (std::fabs(row[c]) > std::fabs(row[largest])) largest = c;
    }
    EXPECT_GT(row[largest], 0) << "vector " << i;
  }
}

TEST(EigenCuda, AgreesWithRef) {
  Rng rng(TestSeed());
  for (int dim : {64, 128, 256}) {
    const auto d = static_cast<size_t>(dim);
    std::vector<std::vector<double>> matrices = {
        Gram(rng, dim, 3 * dim, 1.0),      // dense, no gap
        Gram(rng, dim, 3 * dim, 0.95),     // over several orders of magnitude
        Gram(rng, dim, dim / 3, 0.99),     // low rank
        std::vector<double>(d * d),        // nothing to do
        std::vector<double>(d * d, 2.5)};  // one direction
    for (double& x : matrices[0]) x *= 1e9;
    const std::vector<Eigen> got = OnDevice(dim, matrices);
    for (size_t m = 0; m < matrices.size(); ++m) {
      SCOPED_TRACE("d" + std::to_string(dim) + " matrix " + std::to_string(m));
      std::vector<double> values(d);
      std::vector<float> vectors(d * d);
      const EigenWork work{matrices[m].data(), dim, values.data(), vectors.data()};
      EigenRef(&work, 1, InlineExecutor());
      double worst = 0;
      float worse = 0;  // by how much values ascend
      for (size_t i = 0; i < d; ++i) {
        worst = std::max(worst, std::fabs(double{got[m].values[i]} - values[i]));
        worse = std::max(worse, i > 0 ? got[m].values[i] - got[m].values[i - 1] : 0.0f);
      }
      EXPECT_LE(worst, 1e-5 * values[0]);
      EXPECT_EQ(worse, 0);
      const Errors errors = ErrorsOf(d, matrices[m], got[m]);
      EXPECT_LE(errors.diagonal, 1e-5);
      EXPECT_LE(errors.orthogonal, 1e-5);
      ExpectSignsFixed(d, got[m].vectors);
    }
  }
}

// Where eigenvalues are far apart, vectors are ref's.
TEST(EigenCuda, VectorsAreThoseOfRef) {
  Rng rng(TestSeed() + 1);
  constexpr int kDim = 64;
  const std::vector<double> a = Gram(rng, kDim, 1000, 0.8);
  std::vector<double> values(kDim);
  std::vector<float> vectors(kDim * kDim);
  const EigenWork work{a.data(), kDim, values.data(), vectors.data()};
  EigenRef(&work, 1, InlineExecutor());
  const std::vector<Eigen> got = OnDevice(kDim, {a});
  for (size_t i = 0; i < 8; ++i) {
    double dot = 0;
    for (size_t c = 0; c < kDim; ++c) {
      dot += double{got[0].vectors[i * kDim + c]} * vectors[i * kDim + c];
    }
    EXPECT_NEAR(dot, 1, 1e-4) << "vector " << i;
  }
}

TEST(EigenCuda, EndsOnNaNs) {
  std::vector<double> a(64 * 64, 1.0);
  a[5] = a[5 * 64] = std::nan("");
  (void)OnDevice(64, {a});
}

}  // namespace
}  // namespace kvstrata::cuda
