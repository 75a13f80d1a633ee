// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/pick/pick.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

std::vector<int32_t> RunOp(void (*op)(const PickWork&), const std::vector<float>& scores, int k) {
  const int n = static_cast<int>(scores.size());
  const auto size = static_cast<size_t>(std::clamp(k, 0, n));
  std::vector<int32_t> out(size + 4, -7);
  op({scores.data(), n, k, out.data()});
  for (size_t i = size; i < out.size(); ++i) EXPECT_EQ(out[i], -7) << "wrote beyond its " << size;
  out.resize(size);
  return out;
}

class Pick : public SimdTest {
 protected:
  void ExpectLikeRef(const std::vector<float>& scores) {
    SCOPED_TRACE(random_.Trace());
    const int n = static_cast<int>(scores.size());
    for (int k : {-3, 0, 1, 2, n / 3, n / 2, n - 1, n, n + 5, random_.Below(n + 1)}) {
      EXPECT_EQ(RunOp(TopKSimd, scores, k), RunOp(TopKRef, scores, k)) << k << " of " << n;
    }
  }
};

TEST_P(Pick, RandomScores) {
  for (int n : {0, 1, 2, 15, 16, 17, 1000, 5000}) {
    ExpectLikeRef(NormalFloats(random_, static_cast<size_t>(n)));
  }
}

TEST_P(Pick, TiesKeepTheLowerIndex) {
  std::vector<float> scores(1000);
  for (float& x : scores) x = static_cast<float>(random_.Below(5)) - 2;
  ExpectLikeRef(scores);
  ExpectLikeRef(std::vector<float>(333, 1.5f));
  EXPECT_EQ(RunOp(TopKSimd, {1, 3, 3, 3}, 2), (std::vector<int32_t>{1, 2}));
}

TEST_P(Pick, ZerosOfBothSignsAreEqual) {
  ExpectLikeRef({-0.0f, 0.0f, -0.0f, 0.0f, -1.0f});
  EXPECT_EQ(RunOp(TopKSimd, {-0.0f, 0.0f, -1.0f}, 1), (std::vector<int32_t>{0}));
}

TEST_P(Pick, NaNRanksBelowEverything) {
  EXPECT_EQ(RunOp(TopKSimd, {kNaN, -kInf, kNaN, kInf}, 2), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(RunOp(TopKSimd, {kNaN, -kInf, -kNaN, kInf}, 3), (std::vector<int32_t>{0, 1, 3}));
  std::vector<float> scores = NormalFloats(random_, 500);
  for (int i = 0; i < 200; ++i) scores[random_.Below(500)] = i % 2 == 0 ? kNaN : -kNaN;
  for (int i = 0; i < 50; ++i) scores[random_.Below(500)] = i % 2 == 0 ? kInf : -kInf;
  ExpectLikeRef(scores);
}

TEST_P(Pick, ScoresThatDifferInTheirLastBits) {
  std::vector<float> scores;
  for (uint32_t i = 0; i < 3000; ++i) {
    scores.push_back(
        std::bit_cast<float>(0x40000000u + static_cast<uint32_t>(random_.Below(2000))));
  }
  ExpectLikeRef(scores);
}

// With many scores simd guesses a threshold from every few-th of them.
TEST_P(Pick, ManyScoresHoweverTheyAreSpread) {
  constexpr int n = 32773;
  const auto expect = [&](const std::vector<float>& scores) {
    SCOPED_TRACE(random_.Trace());
    for (int k : {1, 40, 2048, 6000, 20000, n - 1}) {
      EXPECT_EQ(RunOp(TopKSimd, scores, k), RunOp(TopKRef, scores, k)) << k;
    }
  };
  const std::vector<float> random = NormalFloats(random_, n);
  expect(random);
  std::vector<float> scores = random;
  std::ranges::sort(scores);
  expect(scores);
  for (int levels : {6, 200}) {  // more ties than are held, and ties among those that are
    for (float& x : scores) x = static_cast<float>(random_.Below(levels));
    expect(scores);
  }
  for (float above : {-9.0f, 9.0f}) {  // those that are looked at lie above all others, or below
    scores = random;
    for (int i = 0; i < 1024; ++i) scores[static_cast<size_t>(int64_t{i} * n / 1024)] += above;
    expect(scores);
  }
  scores = random;
  for (int i = 0; i < n; i += 3) scores[i] = kNaN;
  for (int i = 1; i < n; i += 5) scores[i] = kInf;
  expect(scores);
  expect(std::vector<float>(n, -kInf));
}

KVS_INSTANTIATE_SIMD(Pick);

TEST(CeilShare, CountsLikeTheSpec) {
  EXPECT_EQ(CeilShare(0.1, 0), 0);
  EXPECT_EQ(CeilShare(0.0, 10), 1);
  EXPECT_EQ(CeilShare(0.1, 10), 1);
  EXPECT_EQ(CeilShare(0.1, 11), 2);
  EXPECT_EQ(CeilShare(0.3, 10), 3);  // 0.3 * 10 is 3 and a bit in fp64
  EXPECT_EQ(CeilShare(0.7, 10), 7);
  EXPECT_EQ(CeilShare(2.0, 10), 10);
}

TEST(Quantile, InterpolatesAsNumpy) {
  EXPECT_EQ(Quantile({4}, 0.3), 4);
  EXPECT_EQ(Quantile({3, 1, 2}, 0.0), 1);
  EXPECT_EQ(Quantile({3, 1, 2}, 1.0), 3);
  EXPECT_EQ(Quantile({3, 1, 2}, 0.5), 2);
  EXPECT_DOUBLE_EQ(Quantile({10, 20}, 0.25), 12.5);
  EXPECT_DOUBLE_EQ(Quantile({10, 20, 40}, 0.9), 36.0);
}

}  // namespace
}  // namespace kvstrata
