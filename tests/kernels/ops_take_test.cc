// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/ops/take/take.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

constexpr double kOff = 1.0 / 31;  // a vote's middle of a bin

class TakeTest : public SimdTest {
 protected:
  // exp of normal numbers: as votes are, they span many octaves.
  std::vector<float> Votes(int n, float spread) {
    std::vector<float> votes = NormalFloats(random_, static_cast<size_t>(n));
    for (float& x : votes) x = std::exp(spread * x - 8);
    return votes;
  }
};

int32_t TakeOf(const std::vector<float>& votes, double missed, int32_t most = 1 << 29) {
  return Take({votes.data(), static_cast<int32_t>(votes.size()), most, missed});
}

// What is left fits, and with the next bin it would not.
TEST_P(TakeTest, LeavesAsMuchAsFits) {
  SCOPED_TRACE(random_.Trace());
  for (int n : {1, 2, 17, 1000, 20000}) {
    for (float spread : {0.1f, 2.0f, 6.0f}) {
      std::vector<float> votes = Votes(n, spread);
      const double total = std::accumulate(votes.begin(), votes.end(), 0.0);
      std::vector<float> sorted = votes;
      std::ranges::sort(sorted);
      for (double share : {0.0, 1e-4, 0.01, 0.3, 0.9}) {
        const int32_t taken = TakeOf(votes, share * total);
        ASSERT_GE(taken, 0);
        ASSERT_LE(taken, n);
        const auto cut = sorted.begin() + (n - taken);
        const double left = std::accumulate(sorted.begin(), cut, 0.0);
        EXPECT_LE(left, share * total * (1 + kOff)) << n << " votes, " << share;
        if (taken == 0) continue;
        // One more would not fit.
        EXPECT_GT(left + *cut, share * total * (1 - kOff)) << n << " votes, " << share;
      }
    }
  }
}

TEST_P(TakeTest, TheOrderOfVotesAndTheirTiesSayNothing) {
  SCOPED_TRACE(random_.Trace());
  std::vector<float> votes = Votes(3000, 3);
  const int32_t taken = TakeOf(votes, 0.01);
  std::ranges::reverse(votes);
  EXPECT_EQ(TakeOf(votes, 0.01), taken);
  const double middle = 0.125 * (1 + 1.0 / 32);
  EXPECT_EQ(TakeOf(std::vector<float>(100, 0.125f), 99.5 * middle), 1);
  EXPECT_EQ(TakeOf(std::vector<float>(100, 0.125f), 100 * middle), 0);
}

TEST_P(TakeTest, TakesNoMoreThanItMay) {
  const std::vector<float> votes(100, 0.01f);
  EXPECT_EQ(TakeOf(votes, 0, 30), 30);
  EXPECT_EQ(TakeOf(votes, 0, 0), 0);
  EXPECT_EQ(TakeOf({}, 0.1), 0);
}

TEST_P(TakeTest, ZerosAreLeft) {
  EXPECT_EQ(TakeOf({0.0f, 0.5f, -0.0f, 0.0f}, 1e-30), 1);
  EXPECT_EQ(TakeOf(std::vector<float>(500, 0.0f), 1e-30), 0);
}

TEST_P(TakeTest, WhatIsNoNumberIsTaken) {
  EXPECT_EQ(TakeOf({kNaN, 0.001f, kInf, 0.002f, -kNaN}, 0.01), 3);
}

KVS_INSTANTIATE_SIMD(TakeTest);

}  // namespace
}  // namespace kvstrata
