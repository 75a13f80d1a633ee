// SPDX-License-Identifier: Apache-2.0
// attend_raw on the GPU against ref, on fresh random inputs. Rows that are not attended
// are NaN, and so is every output before it is written.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/noted_words.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/random_selection.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, group = 4, kv_heads = 2, page_tokens = 16;
  std::vector<int32_t> lengths;
  Kind kind = Kind::kAll;
  int unit_tokens = 16;   // for kUnits
  bool per_head = false;  // lists
  DType out_dtype = DType::kF32;
};

std::string Describe(const Case& c) {
  std::string text = std::string(NameOf(c.dtype)) + " d" + std::to_string(c.dim) + " G" +
                     std::to_string(c.group) + " Hkv" + std::to_string(c.kv_heads) + " page" +
                     std::to_string(c.page_tokens) + " kind" +
                     std::to_string(static_cast<int>(c.kind)) + " unit" +
                     std::to_string(c.unit_tokens) + (c.per_head ? " per head" : "") + " lengths";
  for (int32_t n : c.lengths) text += " " + std::to_string(n);
  return text + " seed " + std::to_string(TestSeed());
}

struct Attention {
  std::vector<float> out, lse;
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c),
        rows(rng, GeometryOf(c), c.lengths, Longest(c) + 64),
        selected(rng, {c.kind, c.unit_tokens, c.per_head ? c.kv_heads : 1}, c.lengths),
        q_bytes(RandomElements(rng, c.dtype, QueryElements())),
        q(q_bytes),
        out(QueryElements() * static_cast<size_t>(SizeOf(c.out_dtype))),
        lse(QueryRows()),
        workspace(std::vector<uint32_t>(
            static_cast<size_t>(kvs_cuda_ops()->attend_raw_workspace_bytes(c.group, c.dim) / 4))) {
    PoisonUnselected();
    rows.Upload();
  }

  AttendRawBatch Work() const {
    AttendRawBatch w;
    w.layer = rows.DeviceLayer();
    w.selection = selected.Device();
    w.batch = rows.batch();
    w.group = case_.group;
    w.tokens = rows.device_tokens();
    w.q = q.get();
    w.q_stride = int64_t{case_.kv_heads} * case_.group * case_.dim * 2;
    w.scale = Scale();
    w.to = {out.get(), case_.out_dtype, lse.get()};
    w.workspace = workspace.get();
    return w;
  }
  void Run(const AttendRawBatch& w) const {
    out.Poison();
    lse.Poison();
    Check(kvs_cuda_ops()->attend_raw(w, nullptr), "attend_raw");
  }
  Attention Got() const { return {Floats(case_.out_dtype, out.Read()), lse.Read()}; }

  Attention Expected() const {
    Attention a{std::vector<float>(QueryElements()), std::vector<float>(QueryRows())};
    for (int b = 0; b < rows.batch(); ++b) {
      for (int h = 0; h < case_.kv_heads; ++h) ExpectedOf(b, h, a);
    }
    return a;
  }
  void ExpectLikeRef() const {
    SCOPED_TRACE(Describe(case_));
    Run(Work());
    const Attention got = Got(), expected = Expected();
    EXPECT_LE(RelativeError(got.out, expected.out), 5e-3);
    EXPECT_LE(RelativeError(got.lse, expected.lse), 1e-3);
    for (uint32_t word : workspace.Read()) ASSERT_EQ(word, 0u);
  }
  bool AttendsNewest() const {
    for (int b = 0; b < rows.batch(); ++b) {
      const int32_t n = rows.tokens[static_cast<size_t>(b)];
      if (n > 0 && !selected.Has(b, 0, n, n - 1)) return false;
    }
    return true;
  }
  // The newest rows are taken away from the device's pages and given as tensors of `dtype`.
  void ExpectNewRowsLikeRef(DType dtype) {
    SCOPED_TRACE(Describe(case_) + " from " + std::string(NameOf(dtype)));
    const Attention expected = Expected();
    const std::vector<std::byte> pages = rows.memory();
    const DeviceArray<std::byte> k(NewestRows(&PagedBatch::Keys, dtype)),
        v(NewestRows(&PagedBatch::Values, dtype));
    for (int b = 0; b < rows.batch(); ++b) {
      const int32_t n = rows.tokens[static_cast<size_t>(b)];
      for (int h = 0; h < case_.kv_heads && n > 0; ++h) rows.PoisonRow(b, h, n - 1);
    }
    rows.Upload();
    AttendRawBatch w = Work();
    const int64_t row = case_.dim * SizeOf(dtype);
    w.new_k = {k.get(), row * case_.kv_heads, row, dtype};
    w.new_v = {v.get(), row * case_.kv_heads, row, dtype};
    const NotedWords words(rows.batch());
    w.not_finite = words.Asked();
    Run(w);
    EXPECT_LE(RelativeError(Got().out, expected.out), 5e-3);
    EXPECT_LE(RelativeError(Got().lse, expected.lse), 1e-3);
    EXPECT_TRUE(rows.Download() == pages);
    EXPECT_EQ(words.Noted(), std::vector<bool>(static_cast<size_t>(rows.batch())));
  }
  // New rows of ones, but for an x in every second sequence's keys or values.
  void ExpectNewRowsNoted(DType dtype, float x) {
    SCOPED_TRACE(Describe(case_) + " from " + std::string(NameOf(dtype)) + ": " +
                 std::to_string(x));
    const size_t row = static_cast<size_t>(case_.kv_heads * case_.dim);
    std::vector<float> k(row * case_.lengths.size(), 1.0f), v = k;
    std::vector<bool> expected;
    const bool finite = std::isfinite(RoundedTo(case_.dtype, RoundedTo(dtype, x)));
    for (size_t b = 0; b < case_.lengths.size(); ++b) {
      expected.push_back(b % 2 == 1 && case_.lengths[b] > 0 && !finite);
      if (b % 2 == 1) (b % 4 == 1 ? k : v)[b * row + row * b / (2 * case_.lengths.size())] = x;
    }
    const DeviceArray<std::byte> d_k(Encoded(k, dtype)), d_v(Encoded(v, dtype));
    AttendRawBatch w = Work();
    const int64_t head = case_.dim * SizeOf(dtype);
    w.new_k = {d_k.get(), head * case_.kv_heads, head, dtype};
    w.new_v = {d_v.get(), head * case_.kv_heads, head, dtype};
    const NotedWords words(rows.batch());
    w.not_finite = words.Asked();
    Run(w);
    Check(cudaDeviceSynchronize(), "attend_raw");
    EXPECT_EQ(words.Noted(), expected);
  }

  static Geometry GeometryOf(const Case& c) {
    return {2, c.kv_heads * c.group, c.kv_heads, c.dim, c.page_tokens, c.dtype};
  }
  static int32_t Longest(const Case& c) {
    return *std::max_element(c.lengths.begin(), c.lengths.end());
  }
  size_t QueryRows() const {
    return case_.lengths.size() * static_cast<size_t>(case_.kv_heads * case_.group);
  }
  size_t QueryElements() const { return QueryRows() * static_cast<size_t>(case_.dim); }
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.dim)); }

 private:
  void PoisonUnselected() {
    for (int b = 0; b < rows.batch(); ++b) {
      const int32_t n = rows.tokens[static_cast<size_t>(b)];
      for (int h = 0; h < case_.kv_heads; ++h) {
        for (int32_t t = 0; t < n; ++t) {
          if (!selected.Has(b, h, n, t)) rows.PoisonRow(b, h, t);
        }
      }
    }
  }
  std::vector<std::byte> NewestRows(PagedRows (PagedBatch::*field)(int, int) const,
                                    DType dtype) const {
    std::vector<float> values;
    for (int b = 0; b < rows.batch(); ++b) {
      const int32_t n = rows.tokens[static_cast<size_t>(b)];
      for (int h = 0; h < case_.kv_heads; ++h) {
        for (int c = 0; c < case_.dim; ++c) {
          const int64_t at = int64_t{c} * SizeOf(case_.dtype);
          values.push_back(n == 0 ? 0.0f
                                  : LoadFloat((rows.*field)(b, h).Row(n - 1) + at, case_.dtype));
        }
      }
    }
    return Encoded(values, dtype);
  }
  void ExpectedOf(int b, int h, Attention& a) const {
    const auto group = static_cast<size_t>(case_.group), dim = static_cast<size_t>(case_.dim);
    const size_t row = static_cast<size_t>(b * case_.kv_heads + h) * group;
    const std::vector<float> queries = Floats(case_.dtype, q_bytes);
    const auto runs = selected.Runs(b, h, rows.tokens[static_cast<size_t>(b)]);
    std::vector<float> m(group), l(group), o(group * dim);
    const AttendWork work{rows.Keys(b, h),
                          rows.Values(b, h),
                          &queries[row * dim],
                          0,
                          1,
                          case_.group,
                          rows.tokens[static_cast<size_t>(b)],
                          runs.data(),
                          static_cast<int32_t>(runs.size()),
                          Scale(),
                          m.data(),
                          l.data(),
                          o.data()};
    AttendRawRef(&work, 1, InlineExecutor());
    const MergeWork merge{m.data(),    l.data(),    o.data(),  1,
                          case_.group, case_.group, case_.dim, &a.out[row * dim],
                          0,           &a.lse[row], 0};
    MergeRef(&merge, 1, InlineExecutor());
  }

  Case case_;

 public:
  PagedBatch rows;
  RandomSelection selected;
  std::vector<std::byte> q_bytes;
  DeviceArray<std::byte> q;
  mutable DeviceArray<std::byte> out;
  mutable DeviceArray<float> lse;
  DeviceArray<uint32_t> workspace;
};

class AttendRawCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};

  std::vector<int32_t> RandomLengths(int count, int longest) {
    std::vector<int32_t> lengths;
    for (int i = 0; i < count; ++i) lengths.push_back(Below(rng_, longest));
    return lengths;
  }
  void ExpectLikeRef(const Case& c) { Problem(rng_, c).ExpectLikeRef(); }
};

TEST_F(AttendRawCuda, EveryTypeDimAndGroup) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int dim : {64, 128, 256}) {
      for (int group = 1; group <= 8; ++group) {
        ExpectLikeRef({dtype, dim, group, 2, 16, {Below(rng_, 700), 257}});
      }
    }
  }
}

TEST_F(AttendRawCuda, LengthsAtEveryEdge) {
  for (int dim : {64, 128, 256}) {
    ExpectLikeRef({DType::kBF16, dim, 4, 2, 16, {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65}});
    ExpectLikeRef({DType::kBF16, dim, 4, 1, 64, {127, 128, 129, 0, 0, 511, 512, 513, 1023, 1025}});
  }
}

TEST_F(AttendRawCuda, EveryPageAndSelection) {
  for (int page : {16, 32, 64}) {
    for (Kind kind : {Kind::kAll, Kind::kWindow, Kind::kUnits, Kind::kTokens}) {
      for (bool per_head : {false, true}) {
        for (int unit : {16, 32, 64}) {
          if (unit != 16 && kind != Kind::kUnits) continue;
          const int dim = 64 << Below(rng_, 3);
          const DType dtype = Below(rng_, 2) == 0 ? DType::kBF16 : DType::kF16;
          ExpectLikeRef({dtype, dim, 1 + Below(rng_, 8), 1 + Below(rng_, 4), page,
                         RandomLengths(1 + Below(rng_, 6), 1200), kind, unit, per_head});
        }
      }
    }
  }
}

TEST_F(AttendRawCuda, EveryOutputType) {
  for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
    Case c{DType::kBF16, 128, 4, 2, 16, RandomLengths(3, 900)};
    c.out_dtype = out;
    ExpectLikeRef(c);
  }
}

TEST_F(AttendRawCuda, RaggedBatches) {
  for (int batch : {1, 7, 33, 64}) {
    ExpectLikeRef({DType::kBF16, 128, 4, 8, 16, RandomLengths(batch, 400)});
    std::vector<int32_t> one_long(static_cast<size_t>(batch), 3);
    one_long.back() = 5000;
    ExpectLikeRef({DType::kBF16, 64, 2, 4, 32, one_long});
  }
}

// Their shares end where items end.
TEST_F(AttendRawCuda, EquallyLongSequences) {
  for (int dim : {64, 128, 256}) {
    const Case c{DType::kBF16, dim, 4, 8, 16, std::vector<int32_t>(8, 2000 + Below(rng_, 1000))};
    ExpectLikeRef(c);
    Problem(rng_, c).ExpectNewRowsLikeRef(DType::kBF16);
  }
}

TEST_F(AttendRawCuda, LongSequencesHaveManySplits) {
  ExpectLikeRef({DType::kBF16, 128, 8, 1, 16, {60000}});
  ExpectLikeRef({DType::kF16, 64, 1, 1, 64, {70001}});
  ExpectLikeRef({DType::kBF16, 256, 2, 1, 32, {20000, 9}});
}

TEST_F(AttendRawCuda, TwoRunsGiveTheSameBits) {
  const Problem p(rng_, {DType::kBF16, 128, 4, 8, 16, RandomLengths(5, 3000)});
  p.Run(p.Work());
  const auto first = p.out.Read();
  for (int i = 0; i < 5; ++i) {
    p.Run(p.Work());
    EXPECT_EQ(p.out.Read(), first) << TestSeed();
  }
}

// Two partials by op merge.
Attention Merged(const std::vector<float>& m, const std::vector<float>& l,
                 const std::vector<float>& o, size_t rows) {
  Attention a{std::vector<float>(rows * 128), std::vector<float>(rows)};
  MergeWork w;
  w.m = m.data();
  w.l = l.data();
  w.o = o.data();
  w.parts = 2;
  w.rows = static_cast<int32_t>(rows);
  w.dim = 128;
  w.out = a.out.data();
  w.out_token = 128;
  w.lse = a.lse.data();
  w.lse_token = 1;
  MergeRef(&w, 1, InlineExecutor());
  return a;
}

// What is left as a partial and merged later is what one call computes.
TEST_F(AttendRawCuda, PartialsOfOtherOpsAreMerged) {
  for (Kind kind : {Kind::kUnits, Kind::kTokens}) {
    const Case c{DType::kBF16, 128, 4, 2, 16, {1500, 0, 40, 700}, kind};
    const Problem p(rng_, c);
    SCOPED_TRACE(Describe(c));
    const size_t rows = p.QueryRows();
    const DeviceArray<float> m(2 * rows), l(2 * rows), o(2 * rows * 128);
    // Sinks and recent rows, then the list alone: [tokens, tokens) is recent.
    AttendRawBatch window = p.Work(), list = p.Work();
    window.selection.unit_tokens = 0;
    window.to.rows = nullptr;
    window.partial = {m.get(), l.get(), o.get(), 1};
    const DeviceArray<int32_t> zeros(std::vector<int32_t>(c.lengths.size(), 0));
    list.selection.sink_end = zeros.get();
    list.selection.recent_begin = list.tokens;
    p.Run(window);
    list.with = window.partial;
    p.Run(list);
    EXPECT_LE(RelativeError(p.Got().out, p.Expected().out), 5e-3);
    // The same result by op merge.
    list.with = {};
    list.to.rows = nullptr;
    list.partial = {m.get() + rows, l.get() + rows, o.get() + rows * 128, 1};
    p.Run(list);
    const Attention merged = Merged(m.Read(), l.Read(), o.Read(), rows);
    EXPECT_LE(RelativeError(merged.out, p.Expected().out), 5e-3);
    EXPECT_LE(RelativeError(merged.lse, p.Expected().lse), 1e-3);
  }
}

// What append and then attention do, in one call.
TEST_F(AttendRawCuda, NewRowsAreAttendedAndWritten) {
  const std::vector<std::vector<int32_t>> batches = {
      {1}, {1000 + Below(rng_, 4000)}, {0, 1, 2, 16, 17, 33, 1025}, RandomLengths(9, 500)};
  for (int dim : {64, 128, 256}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (Kind kind : {Kind::kAll, Kind::kWindow, Kind::kUnits}) {
        for (const auto& lengths : batches) {
          Problem p(rng_, {dtype, dim, 1 + Below(rng_, 8), 1 + Below(rng_, 3), 16, lengths, kind});
          if (!p.AttendsNewest()) continue;  // a draw without recent rows
          p.ExpectNewRowsLikeRef(Below(rng_, 2) == 0 ? dtype : DType::kF32);
        }
      }
    }
  }
}

TEST_F(AttendRawCuda, NewRowsThatAreNotFiniteAreNoted) {
  for (float x : {NAN, INFINITY, -INFINITY, 65519.0f, 65520.0f, 3.4e38f, 1.0f}) {
    for (int dim : {64, 128, 256}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        for (DType source : {dtype, DType::kF32}) {
          Problem p(rng_, {dtype,
                           dim,
                           1 + Below(rng_, 8),
                           1 + Below(rng_, 3),
                           16,
                           {0, 1, 2, 16, 17, 33, 1025, 3000}});
          p.ExpectNewRowsNoted(source, x);
        }
      }
    }
  }
}

// One captured graph serves all lengths: the workspace is 0 again after each replay.
TEST_F(AttendRawCuda, GraphReplaysWhileTokensGrow) {
  Case c{DType::kBF16, 128, 4, 2, 16, {2000, 2000, 2000}};
  Problem p(rng_, c);
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->attend_raw(p.Work(), stream); });
  for (int32_t n : {0, 1, 16, 129, 700, 1999, 2000, 31}) {
    p.rows.tokens = {n, 2000 - n, n / 2};
    p.rows.Upload();
    p.out.Poison();
    Check(cudaDeviceSynchronize(), "before a replay");
    graph.Replay();
    EXPECT_LE(RelativeError(p.Got().out, p.Expected().out), 5e-3) << n << " " << Describe(c);
    for (uint32_t word : p.workspace.Read()) ASSERT_EQ(word, 0u);
  }
}

TEST_F(AttendRawCuda, RefusesShapesItHasNot) {
  const Problem p(rng_, {DType::kBF16, 128, 4, 2, 16, {10}});
  AttendRawBatch w = p.Work();
  w.group = 9;
  EXPECT_NE(kvs_cuda_ops()->attend_raw(w, nullptr), 0);
  w = p.Work();
  w.layer.head_dim = 96;
  EXPECT_NE(kvs_cuda_ops()->attend_raw(w, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
