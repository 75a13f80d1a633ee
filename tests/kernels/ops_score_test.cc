// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/score/score.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

class Score : public SimdTest {
 protected:
  void ExpectLikeRef(ScoreWork work) {
    const auto n = static_cast<size_t>(work.units.end - work.units.begin);
    std::vector<float> ref(n + 1, work.accumulate ? 0.5f : kNaN), simd = ref;
    ref[n] = simd[n] = 7;
    work.out = ref.data();
    ScoreRef(&work, 1, InlineExecutor());
    work.out = simd.data();
    ScoreSimd(&work, 1, InlineExecutor());
    EXPECT_LE(RelativeL2(simd, ref), 1e-5);
    EXPECT_EQ(simd[n], 7);
  }
};

TEST_P(Score, DotOfEveryTypeDimAndQueryCount) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      const PagedFixture rows(random_, dtype, 700, 16, dim);
      for (int queries : {1, 2, 3, 4, 7, 8}) {
        SCOPED_TRACE(std::to_string(dim) + " x " + std::to_string(queries));
        const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(queries * dim));
        for (kvstrata::Run units : {kvstrata::Run{0, 1}, kvstrata::Run{5, 42},
                                    kvstrata::Run{0, 700}, kvstrata::Run{9, 9}}) {
          ScoreWork work{
              ScoreWork::Kind::kDot, q.data(), queries, rows.rows, 0, units, nullptr, false};
          ExpectLikeRef(work);
          work.accumulate = true;
          ExpectLikeRef(work);
        }
      }
    }
  }
}

TEST_P(Score, BoundsOfEveryTypeDimAndQueryCount) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      // Minimum and maximum of a unit lie beside each other, as [field][unit] in an index block.
      PagedFixture rows(random_, dtype, 40, 1, 2 * dim);
      for (int t = 0; t < 40; ++t) {
        for (int c = 0; c < dim; ++c) {
          if (rows.Get(t, c) <= rows.Get(t, dim + c)) continue;
          const float low = rows.Get(t, dim + c);
          rows.Set(t, dim + c, rows.Get(t, c));
          rows.Set(t, c, low);
        }
      }
      PagedRows minima = rows.rows;
      minima.dim = dim;
      for (int queries : {1, 2, 3, 4, 7, 8}) {
        const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(queries * dim));
        ExpectLikeRef({ScoreWork::Kind::kMinMax,
                       q.data(),
                       queries,
                       minima,
                       dim * SizeOf(dtype),
                       {1, 38},
                       nullptr,
                       false});
      }
    }
  }
}

TEST_P(Score, DeviationsOfEveryTypeDimAndQueryCount) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      PagedFixture rows(random_, dtype, 40, 1, 2 * dim);  // a mean and its variance beside it
      for (int t = 0; t < 40; ++t) {
        for (int c = dim; c < 2 * dim; ++c)
          rows.Set(t, c, t % 9 == 0 ? 0 : rows.Get(t, c) * rows.Get(t, c));
      }
      PagedRows means = rows.rows;
      means.dim = dim;
      for (int queries : {1, 2, 3, 4, 7, 8}) {
        const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(queries * dim));
        ExpectLikeRef({ScoreWork::Kind::kDeviation,
                       q.data(),
                       queries,
                       means,
                       dim * SizeOf(dtype),
                       {1, 38},
                       nullptr,
                       false});
      }
    }
  }
}

TEST_P(Score, NaNAndInfiniteRowsDoNotCrashOrReachOthers) {
  PagedFixture rows(random_, DType::kBF16, 40, 16, 64);
  rows.Set(7, 3, kNaN), rows.Set(8, 3, kInf);
  const std::vector<float> q = NormalFloats(random_, 64);
  std::vector<float> ref(40), simd(40);
  ScoreWork work{ScoreWork::Kind::kDot, q.data(), 1, rows.rows, 0, {0, 40}, ref.data(), false};
  ScoreRef(&work, 1, InlineExecutor());
  work.out = simd.data();
  ScoreSimd(&work, 1, InlineExecutor());
  EXPECT_EQ(simd[7], -kInf);
  EXPECT_EQ(ref[7], -kInf);
  EXPECT_TRUE(std::isinf(simd[8]));
  for (int u : {0, 6, 9, 39}) EXPECT_NEAR(simd[u], ref[u], 1e-4);
}

KVS_INSTANTIATE_SIMD(Score);

TEST(ScoreRef, BoundByHand) {
  Random random;
  PagedFixture rows(random, DType::kF32, 1, 1, 128);
  for (int c = 0; c < 64; ++c) rows.Set(0, c, -1), rows.Set(0, 64 + c, 2);
  PagedRows minima = rows.rows;
  minima.dim = 64;
  std::vector<float> q(64, 0.0f);
  q[0] = 3, q[1] = -5;
  float out = 0;
  const ScoreWork work{ScoreWork::Kind::kMinMax, q.data(), 1, minima, 256, {0, 1}, &out, false};
  ScoreRef(&work, 1, InlineExecutor());
  EXPECT_EQ(out, 3 * 2 + -5 * -1);
}

TEST(ScoreRef, DeviationByHand) {
  Random random;
  PagedFixture rows(random, DType::kF32, 1, 1, 128);
  for (int c = 0; c < 64; ++c) rows.Set(0, c, 2), rows.Set(0, 64 + c, c == 0 ? 1 : 0.64f);
  PagedRows means = rows.rows;
  means.dim = 64;
  std::vector<float> q(128, 0.0f);
  q[0] = 3, q[1] = -5, q[64] = -1;
  float out = 0;
  const ScoreWork work{ScoreWork::Kind::kDeviation, q.data(), 2, means, 256, {0, 1}, &out, false};
  ScoreRef(&work, 1, InlineExecutor());
  EXPECT_FLOAT_EQ(out, (3 - 5) * 2 + 2 * 5.0f);  // 9 + 16 under the root; the other query has 0
}

}  // namespace
}  // namespace kvstrata
