// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/ops/covariance/covariance.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

class CovarianceTest : public SimdTest {};

TEST_P(CovarianceTest, LikeRefForEveryTypeDimAndRun) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      const PagedFixture rows(random_, dtype, 700, 16, dim, 8);
      const auto size = static_cast<size_t>(dim) * dim;
      for (kvstrata::Run run :
           {kvstrata::Run{0, 700}, kvstrata::Run{5, 42}, kvstrata::Run{3, 3 + 256},
            kvstrata::Run{1, 1 + 257}, kvstrata::Run{9, 10}}) {
        for (bool accumulate : {false, true}) {
          SCOPED_TRACE(std::to_string(dim) + " rows " + std::to_string(run.end - run.begin));
          std::vector<double> ref(size, accumulate ? 0.5 : kNaN), simd(size + 1, ref[0]);
          simd[size] = 7;
          CovarianceWork work{rows.rows, run, ref.data(), accumulate};
          CovarianceRef(&work, 1, InlineExecutor());
          work.out = simd.data();
          CovarianceSimd(&work, 1, InlineExecutor());
          EXPECT_EQ(simd[size], 7);
          double error = 0, whole = 0;
          for (size_t i = 0; i < size; ++i) {
            error += (simd[i] - ref[i]) * (simd[i] - ref[i]);
            whole += ref[i] * ref[i];
            ASSERT_EQ(simd[i], simd[i % dim * dim + i / dim]);
          }
          EXPECT_LE(std::sqrt(error / whole), 1e-6);
        }
      }
    }
  }
}

TEST_P(CovarianceTest, WholeNumbersAreExactAndManyTilesLoseNothing) {
  SCOPED_TRACE(random_.Trace());
  PagedFixture rows(random_, DType::kF32, 5000, 64, 64);
  for (int t = 0; t < 5000; ++t) {
    for (int c = 0; c < 64; ++c) rows.Set(t, c, static_cast<float>(random_.Below(201) - 100));
    rows.Set(t, 0, 255);  // 5000 * 255^2 does not fit in fp32's 24 bits, 256 * 255^2 does
  }
  std::vector<double> ref(64 * 64, kNaN), simd = ref;
  CovarianceWork work{rows.rows, {0, 5000}, ref.data()};
  CovarianceRef(&work, 1, InlineExecutor());
  work.out = simd.data();
  CovarianceSimd(&work, 1, InlineExecutor());
  EXPECT_EQ(ref[0], 5000.0 * 255 * 255);
  EXPECT_TRUE(ref == simd);
}

TEST_P(CovarianceTest, NoRowsAddNothing) {
  const PagedFixture rows(random_, DType::kBF16, 16, 16, 64);
  std::vector<double> out(64 * 64, kNaN);
  CovarianceWork work{rows.rows, {4, 4}, out.data()};
  CovarianceSimd(&work, 1, InlineExecutor());
  EXPECT_TRUE(out == std::vector<double>(64 * 64, 0.0));
  out.assign(64 * 64, 3.0);
  work.accumulate = true;
  CovarianceSimd(&work, 1, InlineExecutor());
  EXPECT_TRUE(out == std::vector<double>(64 * 64, 3.0));
}

KVS_INSTANTIATE_SIMD(CovarianceTest);

}  // namespace
}  // namespace kvstrata
