// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, group = 4, queries = 1, row_token = 4;
  bool counts = true;
  std::vector<kvstrata::Run> runs = {{0, 90}};

  std::string Describe() const {
    return std::string(NameOf(dtype)) + " dim " + std::to_string(dim) + ", " +
           std::to_string(queries) + " x " + std::to_string(group) + ", row_token " +
           std::to_string(row_token) + (counts ? ", counts" : ", one count");
  }
};

constexpr int kUnits = 90;

// The queries of a token are followed by a NaN, so a wrong stride shows.
struct Inputs {
  PagedFixture k, v;
  std::vector<float> q, log_count;
  int64_t q_token;

  Inputs(Random& random, const Case& c)
      : k(random, c.dtype, kUnits, 16, c.dim, 2),
        v(random, c.dtype, kUnits, 16, c.dim, 4),
        q_token(int64_t{c.group} * c.dim + 1) {
    for (int u = 0; u < kUnits; ++u) {
      log_count.push_back(std::log(static_cast<float>(1 + random.Below(50))));
    }
    q = NormalFloats(random, static_cast<size_t>(c.queries * q_token));
    for (int i = 0; i < c.queries; ++i) q[(i + 1) * q_token - 1] = kNaN;
  }
};

struct Partial {
  std::vector<float> m, l, o;
};

using Attend = void (*)(const AttendCoarseWork*, int64_t, Executor&);

Partial RunCase(Attend attend, const Case& c, const Inputs& in) {
  const auto rows = static_cast<size_t>((c.queries - 1) * c.row_token + c.group);
  Partial p{std::vector<float>(rows, kNaN), std::vector<float>(rows, kNaN),
            std::vector<float>(rows * c.dim, kNaN)};
  AttendCoarseWork work;
  work.k = in.k.rows, work.v = in.v.rows;
  work.q = in.q.data(), work.q_token = in.q_token;
  work.queries = c.queries, work.group = c.group, work.row_token = c.row_token;
  work.runs = c.runs.data(), work.run_count = static_cast<int32_t>(c.runs.size());
  work.log_count = c.counts ? in.log_count.data() : nullptr;
  work.log_count_all = 1.5f;
  work.scale = 0.125f;
  work.m = p.m.data(), work.l = p.l.data(), work.o = p.o.data();
  attend(&work, 1, InlineExecutor());
  return p;
}

// The item's rows are close; what lies between them is still poisoned.
void ExpectLikeRef(const Case& c, const Inputs& in) {
  SCOPED_TRACE(c.Describe());
  const Partial simd = RunCase(AttendCoarseSimd, c, in), ref = RunCase(AttendCoarseRef, c, in);
  for (int row = 0; row < static_cast<int>(ref.m.size()); ++row) {
    const auto o = [&](const Partial& p) {
      return std::vector<float>(p.o.begin() + row * c.dim, p.o.begin() + (row + 1) * c.dim);
    };
    if (row % c.row_token >= c.group) {
      for (const Partial* p : {&simd, &ref}) {
        EXPECT_TRUE(std::isnan(p->m[row]) && std::isnan(p->l[row]));
        for (float x : o(*p)) EXPECT_TRUE(std::isnan(x));
      }
      continue;
    }
    // fp32 sums of logits up to a few tens; exp turns their absolute error into a relative one.
    EXPECT_NEAR(simd.m[row], ref.m[row], 1e-5 * (1 + std::abs(ref.m[row])));
    EXPECT_NEAR(simd.l[row], ref.l[row], 2e-5 * ref.l[row]);
    EXPECT_LE(RelativeL2(o(simd), o(ref)), 2e-5);
  }
}

class AttendCoarse : public SimdTest {};

TEST_P(AttendCoarse, LikeRefForEveryTypeAndDim) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      for (bool counts : {false, true}) {
        const Case c{dtype, dim, 4, 1, 4, counts};
        ExpectLikeRef(c, {random_, c});
      }
    }
  }
}

TEST_P(AttendCoarse, LikeRefForEveryCountOfQueries) {
  SCOPED_TRACE(random_.Trace());
  for (int group = 1; group <= 8; ++group) {
    for (int queries : {1, 2, 3, 9}) {
      for (int row_token : {group, group + 5}) {
        const Case c{DType::kBF16, 128, group, queries, row_token, true};
        ExpectLikeRef(c, {random_, c});
      }
    }
  }
}

TEST_P(AttendCoarse, LikeRefForRaggedRuns) {
  SCOPED_TRACE(random_.Trace());
  for (int round = 0; round < 20; ++round) {
    Case c{DType::kBF16, 128, 4, 1, 4, round % 2 == 0};
    c.runs.clear();
    for (int u = random_.Below(10); u < kUnits;) {
      const int end = std::min(kUnits, u + 1 + random_.Below(9));
      c.runs.push_back({u, end});
      u = end + 1 + random_.Below(5);
    }
    ExpectLikeRef(c, {random_, c});
  }
}

TEST_P(AttendCoarse, NoUnitsGiveTheEmptyPartial) {
  Case c;
  c.runs.clear();
  const Inputs in(random_, c);
  const Partial p = RunCase(AttendCoarseSimd, c, in);
  EXPECT_EQ(p.m, std::vector<float>(4, -kInf));
  EXPECT_EQ(p.l, std::vector<float>(4, 0.0f));
  EXPECT_EQ(p.o, std::vector<float>(4 * 128, 0.0f));
}

// ln 0 = -inf: a unit without tokens weighs nothing, alone or beside others.
TEST_P(AttendCoarse, EmptyUnitsWeighNothing) {
  Case c;
  Inputs in(random_, c);
  for (int u = 10; u < kUnits; ++u) in.log_count[u] = -kInf;
  Case few = c;
  few.runs = {{0, 10}};
  const Partial all = RunCase(AttendCoarseSimd, c, in), ten = RunCase(AttendCoarseRef, few, in);
  EXPECT_LE(RelativeL2(all.l, ten.l), 1e-5);
  EXPECT_LE(RelativeL2(all.o, ten.o), 1e-5);
  few.runs = {{10, 20}};
  const Partial none = RunCase(AttendCoarseSimd, few, in);
  EXPECT_EQ(none.m, std::vector<float>(4, -kInf));
  EXPECT_EQ(none.l, std::vector<float>(4, 0.0f));
  EXPECT_EQ(none.o, std::vector<float>(4 * 128, 0.0f));
}

// Items for single heads of a group share one part.
TEST_P(AttendCoarse, ItemsOfSingleHeadsShareAPart) {
  SCOPED_TRACE(random_.Trace());
  const Case c{DType::kBF16, 128, 4, 3, 4, true};
  const Inputs in(random_, c);
  const Partial ref = RunCase(AttendCoarseRef, c, in);
  Partial p{std::vector<float>(12, kNaN), std::vector<float>(12, kNaN),
            std::vector<float>(12 * 128, kNaN)};
  std::vector<AttendCoarseWork> work;
  for (int g = 0; g < 4; ++g) {
    AttendCoarseWork w;
    w.k = in.k.rows, w.v = in.v.rows;
    w.q = in.q.data() + g * 128, w.q_token = in.q_token;
    w.queries = 3, w.group = 1, w.row_token = 4;
    w.runs = c.runs.data(), w.run_count = 1;
    w.log_count = in.log_count.data();
    w.scale = 0.125f;
    w.m = &p.m[g], w.l = &p.l[g], w.o = &p.o[g * 128];
    work.push_back(w);
  }
  AttendCoarseSimd(work.data(), 4, *NewThreadPool(2));
  EXPECT_LE(RelativeL2(p.m, ref.m), 1e-5);
  EXPECT_LE(RelativeL2(p.l, ref.l), 1e-4);
  EXPECT_LE(RelativeL2(p.o, ref.o), 1e-4);
}

KVS_INSTANTIATE_SIMD(AttendCoarse);

TEST(AttendCoarseRef, OneUnitByHand) {
  Random random;
  Case c{DType::kF32, 64, 1, 1, 1, true};
  c.runs = {{3, 4}};
  Inputs in(random, c);
  for (int i = 0; i < 64; ++i) in.k.Set(3, i, 0), in.q[i] = 0;
  in.k.Set(3, 5, 2), in.q[5] = 3, in.q[6] = 4;
  in.log_count[3] = std::log(7.0f);
  const Partial p = RunCase(AttendCoarseRef, c, in);
  // scale * q.k + ln n
  EXPECT_NEAR(p.m[0], 0.125 * 6 + std::log(7.0), 1e-6);
  EXPECT_EQ(p.l[0], 1);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(p.o[i], in.v.Get(3, i));
}

}  // namespace
}  // namespace kvstrata
