// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/summarize/summarize.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {
namespace {

using Kind = SummarizeWork::Kind;

struct Summary {
  std::vector<std::byte> out, out2;
  bool operator==(const Summary&) const = default;
};

Summary RunOp(void (*op)(const SummarizeWork*, int64_t, Executor&), SummarizeWork work) {
  const auto bytes = static_cast<size_t>(work.keys.dim * SizeOf(work.out_dtype));
  Summary s{std::vector<std::byte>(bytes + 8, std::byte{0xFF}),
            std::vector<std::byte>(bytes + 8, std::byte{0xFF})};
  work.out = s.out.data();
  work.out2 = work.kind == Kind::kMean ? nullptr : s.out2.data();
  op(&work, 1, InlineExecutor());
  return s;
}

class Summarize : public SimdTest {};

// Not a tolerance: the order of the sum is contract, so the bytes agree.
TEST_P(Summarize, MeansAreBitExact) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      const PagedFixture keys(random_, dtype, 200, 16, dim, 8);
      for (kvstrata::Run rows : {kvstrata::Run{0, 1}, kvstrata::Run{0, 16}, kvstrata::Run{13, 77},
                                 kvstrata::Run{32, 200}}) {
        for (DType out : {DType::kBF16, DType::kF32}) {
          SummarizeWork work{Kind::kMean, keys.rows, rows};
          work.out_dtype = out;
          EXPECT_EQ(RunOp(SummarizeSimd, work), RunOp(SummarizeRef, work))
              << NameOf(dtype) << " " << dim << " rows " << rows.begin << ".." << rows.end;
        }
      }
    }
  }
}

TEST_P(Summarize, RowsInTheKeysDTypeAreBitExact) {
  SCOPED_TRACE(random_.Trace());
  for (DType dtype : kDTypes) {
    for (int dim : kDims) {
      PagedFixture keys(random_, dtype, 200, 16, dim, 8);
      for (int t = 0; t < 200; t += 9) {
        keys.Set(t, t % dim, 0.0f), keys.Set(t + 1, t % dim, -0.0f);
        keys.Set(t, (t + 5) % dim, kInf), keys.Set(t, (t + 7) % dim, kNaN);
      }
      for (kvstrata::Run rows : {kvstrata::Run{0, 1}, kvstrata::Run{0, 16}, kvstrata::Run{13, 77},
                                 kvstrata::Run{32, 200}}) {
        for (Kind kind : {Kind::kMinMax, Kind::kDeviation}) {
          SummarizeWork work{kind, keys.rows, rows};
          work.out_dtype = dtype;
          EXPECT_EQ(RunOp(SummarizeSimd, work), RunOp(SummarizeRef, work))
              << NameOf(dtype) << " " << dim << " rows " << rows.begin << ".." << rows.end;
        }
      }
    }
  }
}

TEST_P(Summarize, ZerosKeepTheFirstSign) {
  PagedFixture keys(random_, DType::kF32, 16, 16, 64);
  for (int t = 0; t < 16; ++t) {
    for (int c = 0; c < 64; ++c) keys.Set(t, c, (t + c) % 2 == 0 ? 0.0f : -0.0f);
  }
  SummarizeWork work{Kind::kMinMax, keys.rows, {0, 16}};
  work.out_dtype = DType::kF32;
  EXPECT_EQ(RunOp(SummarizeSimd, work), RunOp(SummarizeRef, work));
}

KVS_INSTANTIATE_SIMD(Summarize);

TEST(SummarizeRef, ByHand) {
  Random random;
  PagedFixture keys(random, DType::kF32, 3, 16, 64);
  for (int c = 0; c < 64; ++c) keys.Set(0, c, 1), keys.Set(1, c, -4), keys.Set(2, c, 9);
  SummarizeWork work{Kind::kMinMax, keys.rows, {0, 3}};
  work.out_dtype = DType::kF32;
  const Summary bounds = RunOp(SummarizeRef, work);
  EXPECT_EQ(LoadAs(DType::kF32, bounds.out.data()), -4);
  EXPECT_EQ(LoadAs(DType::kF32, bounds.out2.data()), 9);
  work.kind = Kind::kMean;
  EXPECT_EQ(LoadAs(DType::kF32, RunOp(SummarizeRef, work).out.data()), 2);
  work.kind = Kind::kDeviation;
  const Summary deviation = RunOp(SummarizeRef, work);
  EXPECT_EQ(LoadAs(DType::kF32, deviation.out.data()), 2);
  EXPECT_FLOAT_EQ(LoadAs(DType::kF32, deviation.out2.data()), (1 + 36 + 49) / 3.0f);
}

// A channel that is large and hardly varies: squares of the keys themselves would hold nothing of
// it.
TEST(SummarizeRef, VarianceIsOfDifferencesFromTheMean) {
  Random random;
  PagedFixture keys(random, DType::kF32, 16, 16, 64);
  for (int t = 0; t < 16; ++t) {
    for (int c = 0; c < 64; ++c) keys.Set(t, c, 3000 + (t % 2 == 0 ? 0.25f : -0.25f));
  }
  SummarizeWork work{Kind::kDeviation, keys.rows, {0, 16}};
  work.out_dtype = DType::kF32;
  EXPECT_EQ(LoadAs(DType::kF32, RunOp(SummarizeRef, work).out2.data()), 0.0625f);
}

TEST(SummarizeRef, VarianceFitsItsDType) {
  Random random;
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    PagedFixture keys(random, dtype, 2, 16, 64);
    for (int c = 0; c < 64; ++c) keys.Set(0, c, 1024), keys.Set(1, c, -1024);
    SummarizeWork work{Kind::kDeviation, keys.rows, {0, 2}};
    work.out_dtype = dtype;
    const float variance = LoadAs(dtype, RunOp(SummarizeRef, work).out2.data());
    EXPECT_EQ(variance, dtype == DType::kF16 ? 65504 : 1024 * 1024);
  }
}

}  // namespace
}  // namespace kvstrata
