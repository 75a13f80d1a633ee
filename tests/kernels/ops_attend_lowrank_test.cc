// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

// Elements of a factor in memory of exactly their size: the address sanitizer sees what lies
// beyond.
using Factor = std::unique_ptr<BF16[]>;

Factor RandomFactor(Random& random, int n) {
  Factor factor(new BF16[static_cast<size_t>(n)]);
  for (int i = 0; i < n; ++i) factor[i] = FromFloat<BF16>(random.Normal() * 0.3f);
  return factor;
}

struct SpanShape {
  int n = 20, k_rank = 8, v_rank = 8;
};

struct Inputs {
  int dim, group, queries, row_token;
  std::vector<Factor> factors;
  std::vector<LowRankSpan> spans;
  std::vector<float> q;
  int64_t q_token;

  // The queries of a token are followed by a NaN, so a wrong stride shows.
  Inputs(Random& random, int head_dim, int heads, int tokens, int rows_apart,
         const std::vector<SpanShape>& shapes)
      : dim(head_dim),
        group(heads),
        queries(tokens),
        row_token(rows_apart),
        q_token(int64_t{heads} * head_dim + 1) {
    for (const SpanShape& s : shapes) {
      spans.push_back({s.n, Rows(random, s.n, s.k_rank), Rows(random, s.n, s.v_rank)});
    }
    q = NormalFloats(random, static_cast<size_t>(queries * q_token));
    for (int i = 0; i < queries; ++i) q[(i + 1) * q_token - 1] = kNaN;
  }

 private:
  LowRankRows Rows(Random& random, int n, int rank) {
    factors.push_back(RandomFactor(random, n * (rank < 0 ? dim : rank)));
    const BF16* left = factors.back().get();
    if (rank < 0) return {left, nullptr, rank};
    factors.push_back(RandomFactor(random, rank * dim));
    return {left, factors.back().get(), rank};
  }
};

struct Partial {
  std::vector<float> m, l, o;
};

using Attend = void (*)(const AttendLowRankWork*, int64_t, Executor&);

Partial RunAttend(Attend attend, const Inputs& in) {
  const auto rows = static_cast<size_t>((in.queries - 1) * in.row_token + in.group);
  Partial p{std::vector<float>(rows, kNaN), std::vector<float>(rows, kNaN),
            std::vector<float>(rows * in.dim, kNaN)};
  const AttendLowRankWork work{in.spans.data(), static_cast<int32_t>(in.spans.size()),
                               in.dim,          in.q.data(),
                               in.q_token,      in.queries,
                               in.group,        in.row_token,
                               0.125f,          p.m.data(),
                               p.l.data(),      p.o.data()};
  attend(&work, 1, InlineExecutor());
  return p;
}

// Rows that belong to the item are close; the others are still poisoned in both.
void ExpectSame(const Inputs& in, const Partial& a, const Partial& b, double tolerance = 1e-5) {
  for (Partial p : {a, b}) {
    for (int row = 0; row < static_cast<int>(p.m.size()); ++row) {
      const bool mine = row % in.row_token < in.group;
      EXPECT_EQ(std::isnan(p.m[row]), !mine);
      EXPECT_EQ(std::isnan(p.l[row]), !mine);
      for (int c = 0; c < in.dim; ++c) EXPECT_EQ(std::isnan(p.o[row * in.dim + c]), !mine);
    }
  }
  auto mine = [&in](const std::vector<float>& all, int width) {
    std::vector<float> rows;
    for (size_t i = 0; i < all.size(); ++i) {
      if (static_cast<int>(i) / width % in.row_token < in.group) rows.push_back(all[i]);
    }
    return rows;
  };
  EXPECT_LE(RelativeL2(mine(a.m, 1), mine(b.m, 1)), tolerance);
  EXPECT_LE(RelativeL2(mine(a.l, 1), mine(b.l, 1)), tolerance);
  EXPECT_LE(RelativeL2(mine(a.o, in.dim), mine(b.o, in.dim)), tolerance);
}

class AttendLowRank : public SimdTest {
 protected:
  static void ExpectLikeRef(const Inputs& in) {
    ExpectSame(in, RunAttend(AttendLowRankSimd, in), RunAttend(AttendLowRankRef, in));
  }
};

TEST_P(AttendLowRank, LikeRefForEveryRank) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : kDims) {
    for (int rank : {-1, 0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 255, 256}) {
      for (int n : {1, 2, 5, 42, 64, 65, 200, 256}) {
        SCOPED_TRACE("dim " + std::to_string(dim) + " rank " + std::to_string(rank) + " n " +
                     std::to_string(n));
        // A first span of many rows keeps the sums away from 0, where errors have no scale.
        ExpectLikeRef({random_, dim, 4, 1, 4, {{30, -1, -1}, {n, rank, rank}}});
      }
    }
  }
}

TEST_P(AttendLowRank, KeysAndValuesDecideApart) {
  SCOPED_TRACE(random_.Trace());
  for (int k_rank : {-1, 5, 32}) {
    for (int v_rank : {-1, 3, 40}) {
      ExpectLikeRef({random_, 128, 4, 1, 4, {{50, k_rank, v_rank}, {9, v_rank, k_rank}}});
    }
  }
}

TEST_P(AttendLowRank, LikeRefForManySpans) {
  SCOPED_TRACE(random_.Trace());
  for (int round = 0; round < 10; ++round) {
    std::vector<SpanShape> shapes;
    for (int i = random_.Below(40); i >= 0; --i) {
      const int n = 1 + random_.Below(random_.Below(4) == 0 ? 256 : 30);
      shapes.push_back({n, 1 + random_.Below(std::min(n, 32)), 1 + random_.Below(std::min(n, 32))});
    }
    ExpectLikeRef({random_, 128, 4, 1, 4, shapes});
  }
}

TEST_P(AttendLowRank, LikeRefForEveryCountOfQueries) {
  SCOPED_TRACE(random_.Trace());
  for (int group = 1; group <= 8; ++group) {
    for (int queries : {1, 2, 5}) {
      for (int row_token : {group, group + 3}) {
        SCOPED_TRACE(std::to_string(queries) + " x " + std::to_string(group) + ", row_token " +
                     std::to_string(row_token));
        ExpectLikeRef({random_, 128, group, queries, row_token, {{40, 12, 20}, {80, -1, 31}}});
      }
    }
  }
}

TEST_P(AttendLowRank, NoSpansGiveTheEmptyPartial) {
  const Partial p = RunAttend(AttendLowRankSimd, {random_, 64, 3, 2, 3, {}});
  EXPECT_EQ(p.m, std::vector<float>(6, -kInf));
  EXPECT_EQ(p.l, std::vector<float>(6, 0.0f));
  EXPECT_EQ(p.o, std::vector<float>(6 * 64, 0.0f));
}

TEST_P(AttendLowRank, LargeScoresDoNotOverflow) {
  SCOPED_TRACE(random_.Trace());
  Inputs in(random_, 128, 4, 1, 4, {{90, 20, 20}, {30, 8, 8}});
  for (float& x : in.q) x *= 1000;
  // Rounding of scores of some thousands shows in exp.
  ExpectSame(in, RunAttend(AttendLowRankSimd, in), RunAttend(AttendLowRankRef, in), 5e-3);
}

// A later span's higher maximum must scale what earlier spans left.
TEST_P(AttendLowRank, RisingMaximaRescale) {
  SCOPED_TRACE(random_.Trace());
  Inputs in(random_, 64, 1, 1, 1, {{3, -1, -1}, {100, 4, 4}, {3, -1, -1}});
  for (int s = 0; s < 3; ++s) {
    for (int i = 0; i < in.spans[s].n; ++i) {
      BF16* row = const_cast<BF16*>(in.spans[s].k.left) + i * (s == 1 ? 4 : 64);
      for (int c = 0; c < (s == 1 ? 4 : 64); ++c) {
        row[c] = FromFloat<BF16>(ToFloat(row[c]) + 0.1f * s * in.q[c]);
      }
    }
  }
  ExpectLikeRef(in);
}

KVS_INSTANTIATE_SIMD(AttendLowRank);

// Factor space is attention over the product of the factors.
TEST(AttendLowRankRef, AttentionOverTheProduct) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const Inputs in(random, 64, 1, 1, 1, {{12, 5, 3}});
  const Partial p = RunAttend(AttendLowRankRef, in);
  const LowRankSpan& span = in.spans[0];
  auto at = [](const LowRankRows& rows, int i, int c) {
    double x = 0;
    for (int j = 0; j < rows.rank; ++j) {
      x += static_cast<double>(ToFloat(rows.left[i * rows.rank + j])) *
           ToFloat(rows.right[j * 64 + c]);
    }
    return x;
  };
  std::vector<double> score(12);
  double m = -kInf, l = 0;
  for (int i = 0; i < 12; ++i) {
    for (int c = 0; c < 64; ++c) score[i] += 0.125 * in.q[c] * at(span.k, i, c);
    m = std::max(m, score[i]);
  }
  std::vector<double> o(64);
  for (int i = 0; i < 12; ++i) {
    l += std::exp(score[i] - m);
    for (int c = 0; c < 64; ++c) o[c] += std::exp(score[i] - m) * at(span.v, i, c);
  }
  EXPECT_NEAR(p.m[0], m, 1e-5);
  EXPECT_NEAR(p.l[0], l, 1e-5);
  for (int c = 0; c < 64; ++c) EXPECT_NEAR(p.o[c], o[c], 1e-5);
}

}  // namespace
}  // namespace kvstrata
