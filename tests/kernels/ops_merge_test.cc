// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/merge/merge.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

struct Partials {
  std::vector<float> m, l, o;
};

Partials RandomPartials(Random& random, int parts, int rows, int dim) {
  Partials p{NormalFloats(random, static_cast<size_t>(parts * rows)),
             {},
             NormalFloats(random, static_cast<size_t>(parts * rows * dim))};
  for (float& m : p.m) {
    m *= 10;
    p.l.push_back(1 + std::abs(random.Normal()));
  }
  return p;
}

// Makes the partial of (part, row) that of no rows at all.
void Empty(Partials& p, int at, int dim) {
  p.m[at] = -kInf, p.l[at] = 0;
  std::fill_n(p.o.begin() + at * dim, dim, 0.0f);
}

struct Merged {
  std::vector<float> out, lse;
};

Merged RunOp(void (*op)(const MergeWork*, int64_t, Executor&), const Partials& p, int parts,
             int rows, int group, int dim) {
  const int64_t out_token = group * dim + 3, lse_token = group + 2;
  const int tokens = rows / group;
  Merged r{std::vector<float>(tokens * out_token, 99.0f),
           std::vector<float>(tokens * lse_token, 99.0f)};
  // Poison what the op must write; what lies between stays 99.
  for (int i = 0; i < rows; ++i) {
    std::fill_n(r.out.begin() + i / group * out_token + i % group * dim, dim, kNaN);
    r.lse[i / group * lse_token + i % group] = kNaN;
  }
  const MergeWork work{p.m.data(), p.l.data(),   p.o.data(), parts,        rows,     group,
                       dim,        r.out.data(), out_token,  r.lse.data(), lse_token};
  op(&work, 1, InlineExecutor());
  return r;
}

class Merge : public SimdTest {};

TEST_P(Merge, LikeRefWithEmptyPartials) {
  SCOPED_TRACE(random_.Trace());
  for (int dim : kDims) {
    for (int parts : {0, 1, 2, 9}) {
      for (int group : {1, 3, 4, 7, 8}) {
        const int rows = group * 3;
        Partials p = RandomPartials(random_, parts, rows, dim);
        for (int at = 0; at < parts * rows; ++at) {
          if (random_.Below(3) == 0 || at % rows == 1) Empty(p, at, dim);  // row 1: nothing at all
        }
        const Merged ref = RunOp(MergeRef, p, parts, rows, group, dim);
        const Merged simd = RunOp(MergeSimd, p, parts, rows, group, dim);
        EXPECT_LE(RelativeL2(simd.out, ref.out), 1e-5) << parts << " parts, group " << group;
        EXPECT_LE(RelativeL2(simd.lse, ref.lse), 1e-6);
      }
    }
  }
}

TEST_P(Merge, NoRowsAreZeroAndMinusInfinity) {
  Partials p = RandomPartials(random_, 2, 1, 64);
  Empty(p, 0, 64), Empty(p, 1, 64);
  const Merged r = RunOp(MergeSimd, p, 2, 1, 1, 64);
  EXPECT_EQ(r.lse[0], -kInf);
  for (int c = 0; c < 64; ++c) EXPECT_EQ(r.out[c], 0.0f);
}

TEST_P(Merge, LseMayBeNull) {
  const Partials p = RandomPartials(random_, 2, 4, 64);
  std::vector<float> out(256, kNaN);
  const MergeWork work{p.m.data(), p.l.data(), p.o.data(), 2,       4, 4,
                       64,         out.data(), 256,        nullptr, 0};
  MergeSimd(&work, 1, InlineExecutor());
  for (float x : out) EXPECT_FALSE(std::isnan(x));
}

KVS_INSTANTIATE_SIMD(Merge);

TEST(MergeRef, ByHand) {
  // exp(0) (l 1, o 2) and exp(ln 2) (l 1, o 5): (2 + 10) / 3.
  const std::vector<float> m{0, std::log(2.0f)}, l{1, 1};
  std::vector<float> o(128, 2.0f), out(64), lse(1);
  std::fill(o.begin() + 64, o.end(), 5.0f);
  const MergeWork work{m.data(), l.data(), o.data(), 2, 1, 1, 64, out.data(), 64, lse.data(), 1};
  MergeRef(&work, 1, InlineExecutor());
  EXPECT_FLOAT_EQ(out[0], 4.0f);
  EXPECT_FLOAT_EQ(lse[0], std::log(3.0f));
}

}  // namespace
}  // namespace kvstrata
