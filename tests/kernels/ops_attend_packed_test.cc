// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

struct Shape {
  int dim = 128, keep = 32, neighbours = 1;
  bool truncate = true;

  std::string Describe() const {
    return "dim " + std::to_string(dim) + " keep " + std::to_string(keep) + " neighbours " +
           std::to_string(neighbours) + (truncate ? "" : " not truncated");
  }
};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (int dim : kDims) {
    for (int neighbours : {1, 2, 4}) {
      for (int eighths : {1, 2, 3}) {
        for (bool truncate : {true, false}) {
          shapes.push_back({dim, dim * eighths / 8, neighbours, truncate});
        }
      }
    }
  }
  // Nothing kept, one kept, and everything that may be.
  shapes.insert(shapes.end(), {{128, 0, 1, true},
                               {128, 1, 1, true},
                               {128, 96, 1, true},
                               {128, 128, 4, false},
                               {64, 48, 1, true},
                               {64, 20, 4, true}});
  return shapes;
}

// Packed rows in memory of exactly their size, and the same rows dense. Padding, of the bitmap and
// of the values, is ones and NaN: it must not count.
struct PackedFixture {
  std::vector<std::byte> memory;
  std::vector<float> dense;  // [n][dim]
  PackedRows rows;

  PackedFixture(Random& random, const Shape& s, int n)
      : dense(static_cast<size_t>(n * s.dim)),
        rows(PackedFormat(s.dim, s.keep, s.neighbours, s.truncate)) {
    memory.resize(static_cast<size_t>(n * rows.stride), std::byte{0xFF});
    rows.data = memory.data();
    std::vector<int> order(static_cast<size_t>(rows.bits));
    for (int b = 0; b < rows.bits; ++b) order[b] = b;
    for (int t = 0; t < n; ++t) {
      for (int b = rows.bits - 1; b > 0; --b) std::swap(order[b], order[random.Below(b + 1)]);
      std::vector<int> set(order.begin(), order.begin() + s.keep / s.neighbours);
      std::sort(set.begin(), set.end());
      Write(random, t, set);
    }
  }
  PackedFixture(const PackedFixture&) = delete;

  std::byte* Row(int t) { return memory.data() + t * rows.stride; }

  // Row t holds exactly the bits of `set`, ascending.
  void Write(Random& random, int t, const std::vector<int>& set) {
    std::byte* row = Row(t);
    for (int b = 0; b < rows.bits; ++b) row[b / 8] &= ~std::byte{1} << (b % 8) | Low(b % 8);
    int at = 0;
    for (int b : set) {
      row[b / 8] |= std::byte{1} << (b % 8);
      for (int c = b * rows.neighbours; c < (b + 1) * rows.neighbours; ++c, ++at) {
        const float value = random.Normal();
        StoreAs(DType::kBF16, row + rows.value_offset + 2 * at, value);
        dense[t * rows.dim + c] = LoadAs(DType::kBF16, row + rows.value_offset + 2 * at);
      }
    }
  }

 private:
  static std::byte Low(int bits) { return std::byte((1 << bits) - 1); }
};

struct Partial {
  std::vector<float> m, l, o;
};

struct Queries {
  int group = 4, queries = 1;
};

// The queries of a token are followed by a NaN, so a wrong stride shows.
struct Inputs {
  PackedFixture k, v;
  std::vector<float> q, r_v;
  int64_t q_token;
  Queries queries;

  Inputs(Random& random, const Shape& s, int rows, Queries n)
      : k(random, s, rows),
        v(random, s, rows),
        r_v(NormalFloats(random, static_cast<size_t>(s.dim * s.dim))),
        q_token(int64_t{n.group} * s.dim + 1),
        queries(n) {
    q = NormalFloats(random, static_cast<size_t>(n.queries * q_token));
    for (int i = 0; i < n.queries; ++i) q[(i + 1) * q_token - 1] = kNaN;
  }
};

using Attend = void (*)(const AttendPackedWork*, int64_t, Executor&);

Partial RunAttend(Attend attend, const Inputs& in, const std::vector<kvstrata::Run>& runs) {
  const auto rows = static_cast<size_t>(in.queries.queries * in.queries.group);
  const int dim = in.k.rows.dim;
  Partial p{std::vector<float>(rows, kNaN), std::vector<float>(rows, kNaN),
            std::vector<float>(rows * dim, kNaN)};
  AttendPackedWork work;
  work.k = in.k.rows, work.v = in.v.rows, work.r_v = in.r_v.data();
  work.q = in.q.data(), work.q_token = in.q_token;
  work.queries = in.queries.queries, work.group = in.queries.group;
  work.runs = runs.data(), work.run_count = static_cast<int32_t>(runs.size());
  work.scale = 0.125f;
  work.m = p.m.data(), work.l = p.l.data(), work.o = p.o.data();
  attend(&work, 1, InlineExecutor());
  return p;
}

void ExpectSame(const Partial& a, const Partial& b, double tolerance = 1e-5) {
  EXPECT_LE(RelativeL2(a.m, b.m), tolerance);
  EXPECT_LE(RelativeL2(a.l, b.l), tolerance);
  EXPECT_LE(RelativeL2(a.o, b.o), tolerance);
}

class AttendPacked : public SimdTest {};

TEST_P(AttendPacked, LikeRefForEveryFormat) {
  SCOPED_TRACE(random_.Trace());
  for (const Shape& s : Shapes()) {
    SCOPED_TRACE(s.Describe());
    const Inputs in(random_, s, 77, {});
    const std::vector<kvstrata::Run> runs = {{0, 5}, {7, 8}, {11, 77}};
    ExpectSame(RunAttend(AttendPackedSimd, in, runs), RunAttend(AttendPackedRef, in, runs));
  }
}

TEST_P(AttendPacked, LikeRefForEveryCountOfQueries) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : kDims) {
    for (int group = 1; group <= 8; ++group) {
      for (int queries : {1, 2, 3, 7}) {
        SCOPED_TRACE(std::to_string(dim) + ": " + std::to_string(queries) + " x " +
                     std::to_string(group));
        const Inputs in(random_, {dim, dim / 4, 1, true}, 50, {group, queries});
        const std::vector<kvstrata::Run> runs = {{1, 50}};
        ExpectSame(RunAttend(AttendPackedSimd, in, runs), RunAttend(AttendPackedRef, in, runs));
      }
    }
  }
}

TEST_P(AttendPacked, LikeRefForRaggedRuns) {
  SCOPED_TRACE(random_.Trace());
  const Inputs in(random_, {}, 600, {});
  for (int round = 0; round < 20; ++round) {
    std::vector<kvstrata::Run> runs;
    for (int t = random_.Below(20); t < 600;) {
      const int end = std::min(600, t + 1 + random_.Below(round < 10 ? 5 : 70));
      runs.push_back({t, end});
      t = end + 1 + random_.Below(9);
    }
    ExpectSame(RunAttend(AttendPackedSimd, in, runs), RunAttend(AttendPackedRef, in, runs));
  }
}

// Keys and values of an item may be of different formats (their losses differ).
TEST_P(AttendPacked, KeysAndValuesOfDifferentFormats) {
  SCOPED_TRACE(random_.Trace());
  Inputs in(random_, {}, 60, {});
  const PackedFixture v(random_, {128, 48, 4, false}, 60);
  const std::vector<kvstrata::Run> runs = {{0, 60}};
  in.v.rows = v.rows;
  ExpectSame(RunAttend(AttendPackedSimd, in, runs), RunAttend(AttendPackedRef, in, runs));
}

TEST_P(AttendPacked, NoRowsGiveTheEmptyPartial) {
  const Inputs in(random_, {}, 1, {3, 2});
  const Partial p = RunAttend(AttendPackedSimd, in, {});
  EXPECT_EQ(p.m, std::vector<float>(6, -kInf));
  EXPECT_EQ(p.l, std::vector<float>(6, 0.0f));
  EXPECT_EQ(p.o, std::vector<float>(6 * 128, 0.0f));
}

// A zero row weighs as much as its score of 0 says, and adds nothing.
TEST_P(AttendPacked, ZeroRowsCount) {
  Inputs in(random_, {128, 0, 1, true}, 9, {});
  const Partial p = RunAttend(AttendPackedSimd, in, {{0, 9}});
  EXPECT_EQ(p.m, std::vector<float>(4, 0.0f));
  EXPECT_EQ(p.l, std::vector<float>(4, 9.0f));
  EXPECT_EQ(p.o, std::vector<float>(4 * 128, 0.0f));
}

TEST_P(AttendPacked, LargeScoresDoNotOverflow) {
  Inputs in(random_, {}, 90, {});
  for (float& x : in.q) x *= 1000;
  const std::vector<kvstrata::Run> runs = {{0, 90}};
  // Rounding of scores of some thousands shows in exp.
  ExpectSame(RunAttend(AttendPackedSimd, in, runs), RunAttend(AttendPackedRef, in, runs), 5e-3);
}

// Under the address sanitizer this sees every access outside of the rows.
TEST_P(AttendPacked, DamagedRowsStayWithinTheirRows) {
  SCOPED_TRACE(random_.Trace());
  for (const Shape& s : Shapes()) {
    for (bool ones : {true, false}) {
      Inputs in(random_, s, 37, {5, 1});
      for (PackedFixture* rows : {&in.k, &in.v}) {
        for (std::byte& b : rows->memory)
          b = ones ? std::byte{0xFF} : std::byte(random_.Below(256));
      }
      RunAttend(AttendPackedSimd, in, {{0, 37}});
      RunAttend(AttendPackedRef, in, {{0, 37}});
    }
  }
}

// Values that a bitmap with too many bits asks for are zeros; its own row is all it spoils.
TEST_P(AttendPacked, TooManyBitsSpoilOnlyTheirRow) {
  SCOPED_TRACE(random_.Trace());
  Inputs in(random_, {}, 40, {});
  std::fill_n(in.k.Row(7), 12, std::byte{0xFF});
  std::fill_n(in.v.Row(7), 12, std::byte{0xFF});
  const std::vector<kvstrata::Run> with = {{0, 40}}, without = {{0, 7}, {8, 40}};
  ExpectSame(RunAttend(AttendPackedSimd, in, with), RunAttend(AttendPackedRef, in, with));
  ExpectSame(RunAttend(AttendPackedSimd, in, without), RunAttend(AttendPackedRef, in, without));
}

TEST_P(AttendPacked, ItemsOfAnyExecutorAreTheSameBits) {
  const Inputs in(random_, {}, 300, {});
  const std::vector<kvstrata::Run> runs = {{0, 300}};
  const Partial alone = RunAttend(AttendPackedSimd, in, runs);
  constexpr int kItems = 16;
  std::vector<Partial> parts(kItems, {std::vector<float>(4, kNaN), std::vector<float>(4, kNaN),
                                      std::vector<float>(4 * 128, kNaN)});
  std::vector<AttendPackedWork> work;
  for (Partial& p : parts) {
    work.push_back({in.k.rows, in.v.rows, in.r_v.data(), in.q.data(), in.q_token, 1, 4, runs.data(),
                    1, 0.125f, p.m.data(), p.l.data(), p.o.data()});
  }
  AttendPackedSimd(work.data(), kItems, *NewThreadPool(3));
  for (const Partial& p : parts) {
    EXPECT_EQ(p.m, alone.m);
    EXPECT_EQ(p.l, alone.l);
    EXPECT_EQ(p.o, alone.o);
  }
}

KVS_INSTANTIATE_SIMD(AttendPacked);

using Score = void (*)(const ScorePackedWork*, int64_t, Executor&);

class ScorePacked : public SimdTest {
 protected:
  static std::vector<float> Run(Score score, ScorePackedWork work, size_t size) {
    std::vector<float> out(size + 1, kNaN);
    out[size] = 7;
    work.out = out.data();
    score(&work, 1, InlineExecutor());
    EXPECT_EQ(out[size], 7);
    out.pop_back();
    return out;
  }
  // A single score may be close to 0, so the error is absolute; scores are of the order of 1 to 10.
  static void ExpectLikeRef(const ScorePackedWork& work, size_t size) {
    const std::vector<float> simd = Run(ScorePackedSimd, work, size);
    const std::vector<float> ref = Run(ScorePackedRef, work, size);
    for (size_t i = 0; i < size; ++i) EXPECT_NEAR(simd[i], ref[i], 5e-5);
  }
};

TEST_P(ScorePacked, LikeRef) {
  SCOPED_TRACE(random_.Trace());
  for (const Shape& s : Shapes()) {
    SCOPED_TRACE(s.Describe());
    const PackedFixture rows(random_, s, 70);
    for (int queries : {1, 2, 3, 4, 8, 19}) {
      const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(queries * s.dim));
      for (kvstrata::Run units : {kvstrata::Run{0, 70}, kvstrata::Run{3, 4}, kvstrata::Run{9, 9}}) {
        const auto n = static_cast<size_t>(units.end - units.begin);
        ScorePackedWork work{rows.rows, q.data(), queries, units, 0.25f, nullptr, 0};
        ExpectLikeRef(work, n);
        if (n == 0) continue;
        work.out_query = static_cast<int64_t>(n);
        ExpectLikeRef(work, queries * n);
      }
    }
  }
}

// Scores of one query land `out_query` apart and nothing between them is written.
TEST_P(ScorePacked, RoomBetweenQueriesIsLeftAlone) {
  const PackedFixture rows(random_, {}, 5);
  const std::vector<float> q = NormalFloats(random_, 3 * 128);
  for (Score score : {ScorePackedSimd, ScorePackedRef}) {
    const std::vector<float> out = Run(score, {rows.rows, q.data(), 3, {0, 5}, 1, nullptr, 8}, 24);
    for (int i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(out[i]), i % 8 >= 5) << i;
  }
}

TEST_P(ScorePacked, DamagedRowsStayWithinTheirRows) {
  for (const Shape& s : Shapes()) {
    PackedFixture rows(random_, s, 19);
    std::fill(rows.memory.begin(), rows.memory.end(), std::byte{0xFF});
    const std::vector<float> q = NormalFloats(random_, static_cast<size_t>(s.dim));
    Run(ScorePackedSimd, {rows.rows, q.data(), 1, {0, 19}, 1, nullptr, 0}, 19);
  }
}

KVS_INSTANTIATE_SIMD(ScorePacked);

class Rotate : public SimdTest {};

TEST_P(Rotate, LikeRefBothWays) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : kDims) {
    const std::vector<float> r = NormalFloats(random_, static_cast<size_t>(dim * dim));
    for (int rows : {1, 2, 3, 4, 5, 8, 11}) {
      for (bool transposed : {false, true}) {
        const int64_t stride = dim + 3;
        const std::vector<float> x = NormalFloats(random_, static_cast<size_t>(rows * stride));
        std::vector<float> ref(static_cast<size_t>(rows * dim) + 1, kNaN), simd = ref;
        ref.back() = simd.back() = 7;
        RotateWork work{r.data(), dim, transposed, x.data(), stride, rows, ref.data()};
        RotateRef(&work, 1, InlineExecutor());
        work.out = simd.data();
        RotateSimd(&work, 1, InlineExecutor());
        EXPECT_LE(RelativeL2(simd, ref), 1e-5) << dim << " " << rows << " " << transposed;
        EXPECT_EQ(simd.back(), 7);
      }
    }
  }
}

KVS_INSTANTIATE_SIMD(Rotate);

TEST(PackedFormat, OfTheSpecification) {
  const PackedRows format = PackedFormat(128, 32, 1, true);
  EXPECT_EQ(format.bits, 96);
  EXPECT_EQ(format.value_offset, 16);
  EXPECT_EQ(format.stride, 80);
  EXPECT_EQ(PackedFormat(256, 64, 1, true).value_offset, 32);
  EXPECT_EQ(PackedFormat(64, 20, 4, true).bits, 12);
  EXPECT_EQ(PackedFormat(64, 20, 4, true).stride, 16 + 48);
}

// Bits and values by hand, against the dense product.
TEST(AttendPackedRef, DenseAttentionOfTheUnpackedRows) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const Shape s{64, 16, 2, true};
  const Inputs in(random, s, 30, {1, 1});
  const Partial p = RunAttend(AttendPackedRef, in, {{0, 30}});
  std::vector<double> score(30);
  double m = -kInf, l = 0;
  for (int t = 0; t < 30; ++t) {
    for (int c = 0; c < 64; ++c) score[t] += 0.125 * in.q[c] * in.k.dense[t * 64 + c];
    m = std::max(m, score[t]);
  }
  std::vector<float> o(64);
  std::vector<double> sum(64);
  for (int t = 0; t < 30; ++t) {
    l += std::exp(score[t] - m);
    for (int c = 0; c < 64; ++c) sum[c] += std::exp(score[t] - m) * in.v.dense[t * 64 + c];
  }
  for (int c = 0; c < 64; ++c) {
    double back = 0;
    for (int j = 0; j < 64; ++j) back += sum[j] * in.r_v[j * 64 + c];
    o[c] = static_cast<float>(back);
  }
  EXPECT_NEAR(p.m[0], m, 1e-5);
  EXPECT_NEAR(p.l[0], l, 1e-4);
  EXPECT_LE(RelativeL2(p.o, o), 1e-5);
}

TEST(ScorePackedRef, LargestQueryByHand) {
  Random random;
  const PackedFixture rows(random, {64, 8, 1, true}, 1);
  const float one = 1;
  std::vector<float> q(2 * 64, 0.0f);
  int c = 0;
  while (rows.dense[c] == 0) ++c;
  q[c] = one, q[64 + c] = -one;
  float out = kNaN;
  const ScorePackedWork work{rows.rows, q.data(), 2, {0, 1}, 2.0f, &out, 0};
  ScorePackedRef(&work, 1, InlineExecutor());
  EXPECT_EQ(out, 2 * std::abs(rows.dense[c]));
}

}  // namespace
}  // namespace kvstrata
