// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <numeric>

#include "kernels/ops/attend_raw/attend_raw.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

using Attend = void (*)(const AttendWork*, int64_t, Executor&);

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, group = 4, queries = 1, position = 0, page_tokens = 16, padding = 0;
  std::vector<kvstrata::Run> runs;
  float scale = 0.125f;
  Rotary rotary;  // {}: none
  int32_t query_place = 0, row_place = -1;
};

struct Partial {
  std::vector<float> m, l, o;
};

std::string Describe(const Case& c) {
  std::string text = std::string(NameOf(c.dtype)) + " dim " + std::to_string(c.dim) + " group " +
                     std::to_string(c.group) + " queries " + std::to_string(c.queries) +
                     " position " + std::to_string(c.position) + " runs";
  for (const kvstrata::Run& run : c.runs) {
    text += " [" + std::to_string(run.begin) + "," + std::to_string(run.end) + ")";
  }
  if (c.rotary.dim > 0) {
    text += " theta " + std::to_string(c.rotary.theta) + " rotary dim " +
            std::to_string(c.rotary.dim) + (c.rotary.interleaved ? " interleaved" : " halves") +
            " places " + std::to_string(c.query_place) + " " + std::to_string(c.row_place);
  }
  return text;
}

// The inputs of a case: the queries of a token are followed by a NaN, so a wrong stride shows.
struct Inputs {
  PagedFixture k, v;
  std::vector<float> q;
  int64_t q_token;

  Inputs(Random& random, const Case& c)
      : k(random, c.dtype, Tokens(c), c.page_tokens, c.dim, c.padding),
        v(random, c.dtype, Tokens(c), c.page_tokens, c.dim, 2 * c.padding),
        q_token(int64_t{c.group} * c.dim + 1) {
    q = NormalFloats(random, static_cast<size_t>(c.queries * q_token));
    for (int i = 0; i < c.queries; ++i) q[(i + 1) * q_token - 1] = kNaN;
  }
  static int Tokens(const Case& c) {
    int tokens = 1;
    for (const kvstrata::Run& run : c.runs) tokens = std::max(tokens, run.end);
    return tokens;
  }
};

Partial RunCase(Attend attend, const Case& c, const Inputs& in) {
  const auto rows = static_cast<size_t>(c.queries * c.group);
  Partial p{std::vector<float>(rows, kNaN), std::vector<float>(rows, kNaN),
            std::vector<float>(rows * c.dim, kNaN)};
  AttendWork work{in.k.rows,  in.v.rows,     in.q.data(),
                  in.q_token, c.queries,     c.group,
                  c.position, c.runs.data(), static_cast<int32_t>(c.runs.size()),
                  c.scale,    p.m.data(),    p.l.data(),
                  p.o.data()};
  std::unique_ptr<RotaryTable> table;
  if (c.rotary.dim > 0) {
    table = std::make_unique<RotaryTable>(c.rotary);
    work.rotary = table.get();
    work.query_place = c.query_place;
    work.row_place = c.row_place;
  }
  attend(&work, 1, InlineExecutor());
  return p;
}

// A row rotated to `place`, straight from the definition.
std::vector<double> RotatedTo(int64_t place, std::vector<double> x, const Rotary& r) {
  std::vector<double> y = x;
  for (int i = 0; i < r.dim / 2; ++i) {
    const double angle = static_cast<double>(place) / std::pow(r.theta, 2.0 * i / r.dim);
    const int a = r.interleaved ? 2 * i : i, b = r.interleaved ? 2 * i + 1 : i + r.dim / 2;
    y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
    y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
  }
  return y;
}

// The partial in double, by neither backend's code.
Partial Direct(const Case& c, const Inputs& in) {
  Partial p;
  std::vector<std::pair<int, std::vector<double>>> rows;  // position, rotated key
  for (const kvstrata::Run& run : c.runs) {
    for (int t = run.begin; t < run.end; ++t) {
      std::vector<double> k(c.dim);
      for (int d = 0; d < c.dim; ++d) k[d] = in.k.Get(t, d);
      const int place = c.row_place < 0 ? t : c.row_place + static_cast<int>(rows.size());
      rows.emplace_back(t, RotatedTo(place, k, c.rotary));
    }
  }
  for (int i = 0; i < c.queries; ++i) {
    for (int g = 0; g < c.group; ++g) {
      const float* from = in.q.data() + i * in.q_token + int64_t{g} * c.dim;
      const auto q = RotatedTo(c.query_place + i, {from, from + c.dim}, c.rotary);
      double m = -INFINITY, l = 0;
      std::vector<double> scores, o(c.dim);
      for (const auto& [t, k] : rows) {
        if (t > c.position + i) break;
        scores.push_back(c.scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0));
        m = std::max(m, scores.back());
      }
      for (size_t r = 0; r < scores.size(); ++r) {
        const double weight = std::exp(scores[r] - m);
        l += weight;
        for (int d = 0; d < c.dim; ++d) o[d] += weight * in.v.Get(rows[r].first, d);
      }
      p.m.push_back(static_cast<float>(m));
      p.l.push_back(static_cast<float>(l));
      p.o.insert(p.o.end(), o.begin(), o.end());
    }
  }
  return p;
}

class AttendRaw : public SimdTest {
 protected:
  void ExpectLikeRef(const Case& c) {
    SCOPED_TRACE(random_.Trace());
    SCOPED_TRACE(Describe(c));
    const Inputs in(random_, c);
    const Partial ref = RunCase(AttendRawRef, c, in), simd = RunCase(AttendRawSimd, c, in);
    EXPECT_LE(RelativeL2(simd.m, ref.m), 1e-5);
    EXPECT_LE(RelativeL2(simd.l, ref.l), 1e-5);
    EXPECT_LE(RelativeL2(simd.o, ref.o), 1e-5);
  }
  // Scores sum up to 256 products of rotated channels, each within 2^-20 at these places.
  void ExpectLikeDirect(const Case& c) {
    SCOPED_TRACE(random_.Trace());
    SCOPED_TRACE(Describe(c));
    const Inputs in(random_, c);
    const Partial direct = Direct(c, in);
    for (Attend attend : {AttendRawRef, AttendRawSimd}) {
      const Partial p = RunCase(attend, c, in);
      EXPECT_LE(RelativeL2(p.m, direct.m), 2e-5);
      EXPECT_LE(RelativeL2(p.l, direct.l), 2e-5);
      EXPECT_LE(RelativeL2(p.o, direct.o), 2e-5);
    }
  }
  // Ascending disjoint runs below `tokens`.
  std::vector<kvstrata::Run> RandomRuns(int tokens) {
    std::vector<kvstrata::Run> runs;
    for (int at = random_.Below(20); at < tokens; at += 1 + random_.Below(60)) {
      const int end = std::min(tokens, at + 1 + random_.Below(100));
      runs.push_back({at, end});
      at = end;
    }
    return runs;
  }
};

TEST_P(AttendRaw, DecodeOfEveryTypeDimAndGroup) {
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      for (int group : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
        ExpectLikeRef({dtype, dim, group, 1, 300, 16, 0, {{3, 200}, {233, 301}}});
      }
    }
  }
}

TEST_P(AttendRaw, PrefillOfEveryTypeDimAndGroup) {
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      for (int group : {1, 3, 4, 7, 8}) {
        ExpectLikeRef({dtype, dim, group, 21, 100, 32, 0, {{0, 90}, {95, 121}}});
      }
    }
  }
}

TEST_P(AttendRaw, RandomShapesRunsAndPages) {
  for (int i = 0; i < 40; ++i) {
    Case c;
    c.dtype = kDTypes[random_.Below(3)];
    c.dim = kDims[random_.Below(3)];
    c.group = 1 + random_.Below(8);
    c.queries = 1 + random_.Below(i % 2 == 0 ? 4 : 64);
    c.position = random_.Below(300);
    c.page_tokens = 16 << random_.Below(3);
    c.padding = 8 * random_.Below(3);
    c.runs = RandomRuns(c.position + c.queries);
    ExpectLikeRef(c);
  }
}

TEST_P(AttendRaw, RotatesEveryTypeDimLayoutAndGroup) {
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      for (int group = 1; group <= 8; ++group) {
        for (bool interleaved : {false, true}) {
          Case c{dtype, dim, group, 1, 180, 16, 0, {{3, 100}, {133, 181}}, 0.1f};
          c.rotary = {10000, dim, interleaved};
          c.query_place = 180;
          ExpectLikeDirect(c);
          c.query_place = 144, c.row_place = 0;  // compact
          ExpectLikeDirect(c);
        }
      }
    }
  }
}

// Partial rotary dimensions that fill no vector, chunks, far places, pages of any size.
TEST_P(AttendRaw, RotatesRandomShapesAndPlaces) {
  for (int i = 0; i < 60; ++i) {
    Case c;
    c.dtype = kDTypes[random_.Below(3)];
    c.dim = kDims[random_.Below(3)];
    c.group = 1 + random_.Below(8);
    c.queries = 1 + random_.Below(i % 2 == 0 ? 4 : 64);
    c.position = random_.Below(300);
    c.page_tokens = 16 << random_.Below(3);
    c.padding = 8 * random_.Below(3);
    c.scale = 1 / std::sqrt(static_cast<float>(c.dim));
    c.runs = RandomRuns(c.position + c.queries);
    if (c.runs.empty() || c.runs[0].begin > c.position) continue;
    c.rotary = {std::pow(10.0, 1 + random_.Below(6)), 2 + 2 * random_.Below(c.dim / 2),
                random_.Below(2) == 1};
    c.query_place = c.position;
    if (random_.Below(2) == 1) {
      c.row_place = random_.Below(1 << (5 * (1 + random_.Below(4))));
      c.query_place = c.row_place + random_.Below(300);
    }
    ExpectLikeDirect(c);
  }
}

// Rotating queries and keys by the same number of places changes nothing but rounding.
TEST_P(AttendRaw, OnlyDistancesBetweenPlacesMatter) {
  Case c{DType::kBF16, 128, 3, 4, 200, 16, 0, {{0, 204}}, 0.1f};
  c.rotary = {10000, 128};
  SCOPED_TRACE(random_.Trace());
  const Inputs in(random_, c);
  c.query_place = 200, c.row_place = 0;
  const Partial here = RunCase(AttendRawSimd, c, in);
  for (const int32_t by : {1, 63, 64, 4096, 262144, 100000000}) {
    c.query_place = 200 + by, c.row_place = by;
    const Partial there = RunCase(AttendRawSimd, c, in);
    EXPECT_LE(RelativeL2(there.o, here.o), 5e-5) << by;
  }
  c.query_place = 201, c.row_place = 0;
  EXPECT_GT(RelativeL2(RunCase(AttendRawSimd, c, in).o, here.o), 1e-3);
}

TEST_P(AttendRaw, RowsOnlyAfterTheQueriesAreEmptyPartials) {
  for (int queries : {1, 2, 64}) {
    const Case c{DType::kBF16, 64, 3, queries, 10, 16, 0, {{200, 240}}};
    const Inputs in(random_, c);
    const Partial p = RunCase(AttendRawSimd, c, in);
    for (float m : p.m) EXPECT_EQ(m, -kInf);
    for (float l : p.l) EXPECT_EQ(l, 0.0f);
    for (float o : p.o) EXPECT_EQ(o, 0.0f);
  }
}

TEST_P(AttendRaw, NoRunsAreEmptyPartials) {
  const Case c{DType::kF32, 64, 4, 1, 10, 16, 0, {}};
  const Partial p = RunCase(AttendRawSimd, c, Inputs(random_, c));
  EXPECT_EQ(p.m, std::vector<float>(4, -kInf));
  EXPECT_EQ(p.l, std::vector<float>(4, 0.0f));
  EXPECT_EQ(p.o, std::vector<float>(256, 0.0f));
}

TEST_P(AttendRaw, LargeScoresDoNotOverflow) {
  for (int queries : {1, 16}) {
    Case c{DType::kF32, 128, 4, queries, 200, 16, 0, {{0, 201}}};
    c.scale = 40.0f;
    SCOPED_TRACE(random_.Trace());
    const Inputs in(random_, c);
    const Partial p = RunCase(AttendRawSimd, c, in), ref = RunCase(AttendRawRef, c, in);
    EXPECT_LE(RelativeL2(p.m, ref.m), 1e-5);
    for (float l : p.l) EXPECT_TRUE(l >= 0.99f && l < 300.0f) << l;
  }
}

// A later token's NaN must not reach an earlier token of the same chunk.
TEST_P(AttendRaw, NaNIsSeenByNobodyBeforeIt) {
  for (int group : {1, 3, 4}) {
    for (int queries : {2, 64}) {
      SCOPED_TRACE(std::to_string(group) + " " + std::to_string(queries) + random_.Trace());
      const Case c{DType::kBF16, 64, group, queries, 100, 16, 0, {{0, 100 + queries}}};
      Inputs in(random_, c);
      const int bad = queries / 2;
      for (int channel = 0; channel < 64; ++channel) {
        in.k.Set(100 + bad, channel, kNaN);
        in.v.Set(100 + bad, channel, kNaN);
      }
      const Partial p = RunCase(AttendRawSimd, c, in), ref = RunCase(AttendRawRef, c, in);
      const auto clean = static_cast<ptrdiff_t>(bad * group);
      EXPECT_LE(RelativeL2({p.o.begin(), p.o.begin() + clean * 64},
                           {ref.o.begin(), ref.o.begin() + clean * 64}),
                1e-5);
      for (size_t i = static_cast<size_t>(clean); i < p.l.size(); ++i) {
        EXPECT_TRUE(std::isnan(p.l[i])) << i;
      }
    }
  }
}

TEST_P(AttendRaw, InfiniteKeysAndValuesDoNotCrash) {
  for (DType dtype : kDTypes) {
    for (int queries : {1, 64}) {
      const Case c{dtype, 128, 4, queries, 200, 16, 0, {{0, 200 + queries}}};
      Inputs in(random_, c);
      for (int t = 0; t < 200; t += 7) in.k.Set(t, t % 128, t % 2 == 0 ? kInf : -kInf);
      for (int t = 0; t < 200; t += 5) in.v.Set(t, t % 128, kInf);
      RunCase(AttendRawSimd, c, in);
    }
  }
}

TEST_P(AttendRaw, ThePoolGivesTheSameBitsAsOneThread) {
  constexpr int kItems = 40;
  const Case c{DType::kBF16, 64, 3, 4, 500, 16, 0, {{0, 504}}};
  const Inputs in(random_, c);
  const auto run = [&](Executor& executor) {
    std::vector<float> m(kItems * 12), l(kItems * 12), o(kItems * 12 * 64);
    std::vector<kvstrata::Run> slices;
    std::vector<AttendWork> work;
    for (int i = 0; i < kItems; ++i) slices.push_back({i * 12, i * 12 + 12});
    for (int i = 0; i < kItems; ++i) {
      work.push_back({in.k.rows, in.v.rows, in.q.data(), in.q_token, 4, 3, 500, &slices[i], 1,
                      0.125f, &m[i * 12], &l[i * 12], &o[i * 12 * 64]});
    }
    AttendRawSimd(work.data(), kItems, executor);
    return o;
  };
  EXPECT_EQ(run(InlineExecutor()), run(*NewThreadPool(4)));
}

KVS_INSTANTIATE_SIMD(AttendRaw);

// The bound that rotary.h gives, for positions of every number of digits.
TEST(RotaryTable, ProductsOfDigitsStayWithinTheBound) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const Rotary rotary{10000, 128};
  const RotaryTable table(rotary);
  for (int i = 0; i < 5000; ++i) {
    const int digits = 1 + i % 5;
    const int32_t position = random.Below(1 << std::min(6 * digits, 30));
    const int pair = random.Below(64);
    float cos = 1, sin = 0;
    for (int level = 0; level < digits; ++level) {
      const float* row = table.Row(level, position >> (6 * level) & 63);
      const float c = row[pair], s = row[64 + pair];
      const float before = cos;
      cos = before * c - sin * s;
      sin = sin * c + before * s;
    }
    const double angle = position * std::pow(10000.0, -pair / 64.0);
    const double off = std::hypot(cos - std::cos(angle), sin - std::sin(angle));
    EXPECT_LE(off, digits * 0x1p-24 + (digits - 1) * 0x1p-22) << position << " pair " << pair;
  }
}

TEST(AttendRawRef, AttendsByHand) {
  // Two rows with scores 0 and ln 3: weights 1/3 and 1 relative to the maximum.
  Random random;
  PagedFixture k(random, DType::kF32, 2, 16, 64), v(random, DType::kF32, 2, 16, 64);
  for (int c = 0; c < 64; ++c) {
    k.Set(0, c, 0), k.Set(1, c, c == 0 ? std::log(3.0f) : 0);
    v.Set(0, c, 3), v.Set(1, c, 6);
  }
  std::vector<float> q(64, 0.0f), m(1), l(1), o(64);
  q[0] = 1;
  const kvstrata::Run run{0, 2};
  const AttendWork work{k.rows, v.rows, q.data(), 64,       1,        1,       1,
                        &run,   1,      1.0f,     m.data(), l.data(), o.data()};
  AttendRawRef(&work, 1, InlineExecutor());
  EXPECT_FLOAT_EQ(m[0], std::log(3.0f));
  EXPECT_FLOAT_EQ(l[0], 4.0f / 3);
  EXPECT_FLOAT_EQ(o[5], 7.0f);
}

}  // namespace
}  // namespace kvstrata
