// SPDX-License-Identifier: Apache-2.0
// covariance on the GPU against ref, on fresh random inputs; outputs and workspace are NaN before.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/mosaickv/ops/covariance/covariance.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/head_pages.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

// Sums of tensor cores are truncated, not rounded (covariance_cuda.h).
constexpr double kTolerance = 1e-4;

struct Case {
  HeadRowShape shape;
  std::vector<Run> runs;  // each item's
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c), pages_(rng, static_cast<int>(c.runs.size() + 1) / 2, LastEnd(c), c.shape) {
    const auto square = static_cast<size_t>(c.shape.head_dim) * c.shape.head_dim;
    out_ = DeviceArray<double>(square * c.runs.size());
    std::vector<CovarianceItem> items;
    for (size_t i = 0; i < c.runs.size(); ++i) {
      items.push_back({pages_.Device(static_cast<int>(i), c.runs[i]),
                       out_.address() + i * square * sizeof(double)});
      work_.rows_max = std::max(work_.rows_max, c.runs[i].end - c.runs[i].begin);
    }
    items_ = DeviceArray<CovarianceItem>(items);
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(items.size(), 0));
    work_.shape = c.shape;
    work_.items = items_.get();
    work_.count = static_cast<int32_t>(items.size());
    work_.counters = counters_.get();
    workspace_ = DeviceArray<float>(
        static_cast<size_t>(
            OpsOf<PackedOps>(kvs_cuda_ops()->packed).covariance_workspace_bytes(work_)) /
        4);
    work_.workspace = workspace_.get();
  }

  std::vector<double> Run(bool accumulate) {
    work_.accumulate = accumulate;
    EXPECT_EQ(OpsOf<PackedOps>(kvs_cuda_ops()->packed).covariance(work_, nullptr), 0);
    return out_.Read();
  }
  std::vector<double> Reference() const {
    const auto square = static_cast<size_t>(case_.shape.head_dim) * case_.shape.head_dim;
    std::vector<double> out(square * case_.runs.size());
    std::vector<CovarianceWork> works;
    for (size_t i = 0; i < case_.runs.size(); ++i) {
      works.push_back({pages_.Host(static_cast<int>(i)), case_.runs[i], &out[i * square], false});
    }
    CovarianceRef(works.data(), static_cast<int64_t>(works.size()), InlineExecutor());
    return out;
  }

 private:
  static int32_t LastEnd(const Case& c) {
    int32_t end = 1;
    for (const auto& run : c.runs) end = std::max(end, run.end);
    return end;
  }

  const Case& case_;
  HeadPages pages_;
  DeviceArray<double> out_;
  DeviceArray<CovarianceItem> items_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<float> workspace_;
  CovarianceBatch work_;
};

// The largest error of `got` in units of the two channels' sizes; infinity for NaNs.
double WorstError(const Case& c, const std::vector<double>& got, const std::vector<double>& want,
                  double times) {
  const auto dim = static_cast<size_t>(c.shape.head_dim);
  double worst = 0;
  for (size_t item = 0; item < c.runs.size(); ++item) {
    const double *g = &got[item * dim * dim], *w = &want[item * dim * dim];
    for (size_t i = 0; i < dim; ++i) {
      for (size_t j = 0; j < dim; ++j) {
        const double unit = std::sqrt(w[i * dim + i] * w[j * dim + j]) * times;
        const double off = std::fabs(g[i * dim + j] - times * w[i * dim + j]);
        if (!(off <= kTolerance * unit))
          worst = std::max(worst, std::isnan(off) ? 1e9 : off / unit);
      }
    }
  }
  return worst;
}

TEST(CovarianceCuda, AgreesWithRefAndAccumulates) {
  Rng rng(TestSeed());
  for (int dim : {64, 128, 256}) {
    for (int page : {16, 32, 64}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        const int32_t long_end = kCovarianceRows / (dim / 64) + 1 + Below(rng, 5000);
        const Case c{ShapeOf(dim, page, dtype),
                     {{0, long_end},
                      {7, 7},
                      {3, 4 + Below(rng, 60)},
                      {Below(rng, 100), 100 + Below(rng, 300)}}};
        SCOPED_TRACE("d" + std::to_string(dim) + " page" + std::to_string(page) + " dtype" +
                     std::to_string(static_cast<int>(dtype)) + " rows" + std::to_string(long_end));
        Problem problem(rng, c);
        const std::vector<double> want = problem.Reference();
        const std::vector<double> got = problem.Run(false);
        EXPECT_EQ(WorstError(c, got, want, 1), 0);
        EXPECT_EQ(WorstError(c, problem.Run(true), want, 2), 0);
        EXPECT_EQ(problem.Run(false), got);  // the same bits, and counters that reset themselves
      }
    }
  }
}

// Small enough for racecheck (bench/cuda/run_gpu.sh).
TEST(CovarianceCuda, OfFewRows) {
  Rng rng(TestSeed());
  const Case c{ShapeOf(64, 16, DType::kBF16), {{0, 70 + Below(rng, 200)}, {3, 40}}};
  Problem problem(rng, c);
  EXPECT_EQ(WorstError(c, problem.Run(false), problem.Reference(), 1), 0);
}

TEST(CovarianceCuda, RefusesOtherShapes) {
  CovarianceBatch work;
  work.shape = ShapeOf(96, 16, DType::kBF16);
  work.count = 1;
  EXPECT_NE(OpsOf<PackedOps>(kvs_cuda_ops()->packed).covariance(work, nullptr), 0);
  work.shape = ShapeOf(128, 24, DType::kBF16);
  EXPECT_NE(OpsOf<PackedOps>(kvs_cuda_ops()->packed).covariance(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
