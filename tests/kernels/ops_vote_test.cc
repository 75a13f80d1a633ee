// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels/ops/vote/vote.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

class VoteTest : public SimdTest {
 protected:
  // logits [heads][stride]; the op takes a copy over.
  void ExpectLikeRef(std::vector<float> logits, int64_t stride, int32_t heads, int32_t n) {
    const auto votes = [&](void (*op)(const VoteWork&, Executor&), Executor& executor) {
      std::vector<float> own = logits, max(heads, kNaN), sum(heads, kNaN), out(n + 1, kNaN);
      out[n] = 7;
      op({own.data(), stride, heads, n, max.data(), sum.data(), out.data()}, executor);
      for (int h = 0; h < heads; ++h) {
        for (int64_t t = h * stride + n; t < (h + 1) * stride; ++t) EXPECT_EQ(own[t], logits[t]);
      }
      EXPECT_EQ(out[n], 7);
      return out;
    };
    const std::vector<float> simd = votes(VoteSimd, InlineExecutor());
    EXPECT_LE(RelativeL2(simd, votes(VoteRef, InlineExecutor())), 1e-6);
    EXPECT_TRUE(votes(VoteSimd, *NewThreadPool(2)) == simd);
  }
};

TEST_P(VoteTest, ScoresOfEveryTypeDimAndQueryCount) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      const PagedFixture rows(random_, dtype, 700, 16, dim, 8);
      for (int queries : {1, 2, 3, 4, 7, 8, 17}) {
        SCOPED_TRACE(std::to_string(dim) + " x " + std::to_string(queries));
        const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(queries * dim));
        for (kvstrata::Run run : {kvstrata::Run{0, 1}, kvstrata::Run{5, 42}, kvstrata::Run{0, 700},
                                  kvstrata::Run{9, 9}}) {
          const int64_t n = run.end - run.begin, row = n + 3;
          std::vector<float> ref(static_cast<size_t>(queries * row), 7.0f), simd = ref;
          ScoreTokensWork work{rows.rows, run, q.data(), queries, 0.125f, ref.data(), row};
          ScoreTokensRef(&work, 1, InlineExecutor());
          work.out = simd.data();
          ScoreTokensSimd(&work, 1, InlineExecutor());
          EXPECT_LE(RelativeL2(simd, ref), 1e-6);
          for (int i = 0; i < queries; ++i) {
            for (int64_t t = n; t < row; ++t) EXPECT_EQ(simd[i * row + t], 7);
          }
        }
      }
    }
  }
}

TEST_P(VoteTest, VotesOfAnyNumberOfHeadsAndPositions) {
  SCOPED_TRACE(random_.Trace());
  for (int heads : {1, 3, 4, 6, 32}) {
    for (int n : {1, 5, 16, 100, 1024, 1025, 5000}) {
      for (float spread : {0.1f, 3.0f, 60.0f}) {
        SCOPED_TRACE(std::to_string(heads) + " x " + std::to_string(n));
        const int64_t stride = n + 5;
        std::vector<float> logits = NormalFloats(random_, static_cast<size_t>(heads * stride));
        for (float& x : logits) x *= spread;
        for (int h = 0; h < heads; ++h) {
          for (int64_t t = n; t < stride; ++t) logits[h * stride + t] = kInf;  // not to be read
        }
        ExpectLikeRef(logits, stride, heads, n);
      }
    }
  }
}

TEST_P(VoteTest, VotesOfAHeadSumToOneAndTiesShare) {
  std::vector<float> logits(3 * 4096, -4.0f), max(3), sum(3), votes(4096);
  VoteSimd({logits.data(), 4096, 3, 4096, max.data(), sum.data(), votes.data()}, InlineExecutor());
  for (float vote : votes) EXPECT_NEAR(vote, 3.0 / 4096, 1e-8);
}

TEST_P(VoteTest, MaskedPositionsGetNoVoteAndMaskedHeadsGiveNone) {
  SCOPED_TRACE(random_.Trace());
  std::vector<float> logits = NormalFloats(random_, 3 * 200);
  for (int t = 0; t < 200; ++t) logits[200 + t] = -kInf;
  logits[5] = logits[405] = -kInf;
  ExpectLikeRef(logits, 200, 3, 200);
  std::vector<float> max(3), sum(3), votes(200, kNaN);
  VoteSimd({logits.data(), 200, 3, 200, max.data(), sum.data(), votes.data()}, InlineExecutor());
  EXPECT_EQ(votes[5], 0);
  double total = 0;
  for (float vote : votes) total += vote;
  EXPECT_NEAR(total, 2, 1e-5);
}

// A head's share of all attention, by the formula of docs/spec/bits.md 3.
double ShareOf(const std::vector<float>& logits, const std::vector<float>& always, double noise,
               int t) {
  double own = 0, all = 0;
  for (float x : logits) own += std::exp(static_cast<double>(x));
  for (float x : always) all += std::exp(static_cast<double>(x));
  return std::exp(static_cast<double>(logits[t])) / (own * std::exp(-noise / 2) + all);
}

TEST_P(VoteTest, SharesOfAllAttentionCountWhatIsAlwaysAttendedAndTheNoise) {
  SCOPED_TRACE(random_.Trace());
  constexpr int kHeads = 3, kN = 1300, kAlways = 7;
  std::vector<float> logits = NormalFloats(random_, kHeads * kN),
                     always = NormalFloats(random_, kHeads * kAlways);
  for (float& x : always) x += 6;  // most attention goes there
  const std::vector<float> noise = {0.0f, 0.7f, 3.0f};
  std::vector<float> max(kHeads), sum(kHeads), votes(kN);
  for (const auto op : {VoteRef, VoteSimd}) {
    std::vector<float> own = logits;
    VoteWork work{own.data(), kN, kHeads, kN, max.data(), sum.data(), votes.data()};
    work.always = always.data(), work.always_n = kAlways, work.noise = noise.data();
    op(work, InlineExecutor());
    for (int t = 0; t < kN; t += 13) {
      double expected = 0;
      for (int h = 0; h < kHeads; ++h) {
        const auto mine = logits.begin() + h * kN;
        const auto others = always.begin() + h * kAlways;
        expected += ShareOf({mine, mine + kN}, {others, others + kAlways}, noise[h], t);
      }
      EXPECT_NEAR(votes[t], expected, 3e-6 * expected) << t;
    }
  }
}

// Nothing is left for others where all attention goes to what is always attended.
TEST_P(VoteTest, LogitsFarAboveTheOthersLeaveThemNothing) {
  std::vector<float> logits(200, 0.0f), always = {150.0f}, max(1), sum(1), votes(200, kNaN);
  VoteWork work{logits.data(), 200, 1, 200, max.data(), sum.data(), votes.data()};
  work.always = always.data(), work.always_n = 1;
  VoteSimd(work, InlineExecutor());
  for (float vote : votes) EXPECT_LT(vote, 1e-30);
}

KVS_INSTANTIATE_SIMD(VoteTest);

}  // namespace
}  // namespace kvstrata
