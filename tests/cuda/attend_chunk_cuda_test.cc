// SPDX-License-Identifier: Apache-2.0
// attend_chunk on the GPU against ref, on fresh random inputs. Rows that are not attended are NaN,
// and so is every output and workspace before it is written.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/random_selection.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, group = 4, kv_heads = 2, page_tokens = 16;
  int32_t before = 0, rows = 1;  // tokens before the chunk, and of it
  Kind kind = Kind::kAll;
  int unit_tokens = 16;   // for kUnits
  bool per_head = false;  // lists
  DType out_dtype = DType::kF32;
};

std::string Describe(const Case& c) {
  return std::string(NameOf(c.dtype)) + " d" + std::to_string(c.dim) + " G" +
         std::to_string(c.group) + " Hkv" + std::to_string(c.kv_heads) + " page" +
         std::to_string(c.page_tokens) + " kind" + std::to_string(static_cast<int>(c.kind)) +
         " unit" + std::to_string(c.unit_tokens) + (c.per_head ? " per head" : "") + " rows " +
         std::to_string(c.before) + "+" + std::to_string(c.rows) + " seed " +
         std::to_string(TestSeed());
}

struct Attention {
  std::vector<float> out, lse;
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c),
        pages_(rng, {2, c.kv_heads * c.group, c.kv_heads, c.dim, c.page_tokens, c.dtype},
               {c.before + c.rows}, c.before + c.rows + 64),
        selection_(rng, {c.kind, c.unit_tokens, c.per_head ? c.kv_heads : 1}, {c.before + c.rows}),
        q_bytes_(RandomElements(rng, c.dtype, QueryRows() * static_cast<size_t>(c.dim))),
        q_(q_bytes_),
        out_(QueryRows() * static_cast<size_t>(c.dim * SizeOf(c.out_dtype))),
        lse_(QueryRows()),
        tokens_(Visible(c.before)),
        counters_(std::vector<uint32_t>(
            static_cast<size_t>(c.kv_heads * (c.rows * c.group / 64 + 1)), 0)),
        workspace_(static_cast<size_t>(kvs_cuda_ops()->attend_chunk_workspace_bytes(c.dim) / 4)) {
    for (int h = 0; h < c.kv_heads; ++h) {
      for (int32_t t = 0; t < c.before + c.rows; ++t) {
        if (!selection_.Has(0, h, c.before + c.rows, t)) pages_.PoisonRow(0, h, t);
      }
    }
    pages_.Upload();
  }

  // Work for `rows` tokens of the chunk, from its token `first` on.
  AttendChunkBatch Work(int32_t first, int32_t rows) const {
    const int64_t heads = case_.kv_heads * case_.group;
    AttendChunkBatch w;
    w.layer = pages_.DeviceLayer();
    w.selection = selection_.Device();
    w.rows = rows;
    w.group = case_.group;
    w.tokens = tokens_.get() + first;
    w.q_stride = heads * case_.dim * 2;
    w.q = q_.get() + first * w.q_stride;
    w.scale = Scale();
    w.to = {out_.get() + first * heads * case_.dim * SizeOf(case_.out_dtype), case_.out_dtype,
            lse_.get() + first * heads};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    return w;
  }
  AttendChunkBatch Work() const { return Work(0, case_.rows); }

  void Poison() {
    out_.Poison();
    lse_.Poison();
  }
  Attention Got() const { return {Floats(case_.out_dtype, out_.Read()), lse_.Read()}; }
  std::vector<std::byte> Output() const { return out_.Read(); }
  // The chunk now begins after `before` tokens.
  void MoveTo(int32_t before) {
    case_.before = before;
    tokens_.Write(Visible(before));
  }

  Attention Expected() const {
    Attention a{std::vector<float>(QueryRows() * static_cast<size_t>(case_.dim)),
                std::vector<float>(QueryRows())};
    const std::vector<int32_t> tokens = Visible(case_.before);
    AttendChunkBatch w = Work();
    w.layer = pages_.HostLayer();
    w.selection = selection_.Host();
    w.tokens = tokens.data();
    w.q = q_bytes_.data();
    w.to = {a.out.data(), DType::kF32, a.lse.data()};
    AttendChunkRef(w);
    return a;
  }
  void ExpectLikeRef() const {
    SCOPED_TRACE(Describe(case_));
    const Attention got = Got(), expected = Expected();
    EXPECT_LE(RelativeError(got.out, expected.out), 5e-3);
    EXPECT_LE(RelativeError(got.lse, expected.lse), 1e-3);
    for (uint32_t c : counters_.Read()) EXPECT_EQ(c, 0u);
  }
  void RunAndExpectLikeRef() {
    Poison();
    Check(kvs_cuda_ops()->attend_chunk(Work(), nullptr), "attend_chunk");
    ExpectLikeRef();
  }

 private:
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.dim)); }
  size_t QueryRows() const {
    return static_cast<size_t>(case_.rows * case_.kv_heads * case_.group);
  }
  std::vector<int32_t> Visible(int32_t before) const {
    std::vector<int32_t> visible(static_cast<size_t>(case_.rows));
    std::iota(visible.begin(), visible.end(), before + 1);
    return visible;
  }

  Case case_;
  PagedBatch pages_;
  RandomSelection selection_;
  std::vector<std::byte> q_bytes_;
  DeviceArray<std::byte> q_, out_;
  DeviceArray<float> lse_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<float> workspace_;
};

class AttendChunkCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};

  void ExpectLikeRef(const Case& c) { Problem(rng_, c).RunAndExpectLikeRef(); }
};

TEST_F(AttendChunkCuda, EveryTypeDimAndGroup) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int dim : {64, 128, 256}) {
      for (int group = 1; group <= 8; ++group) {
        ExpectLikeRef({dtype, dim, group, 2, 16, Below(rng_, 300), 1 + Below(rng_, 90)});
      }
    }
  }
}

TEST_F(AttendChunkCuda, LengthsAtEveryEdge) {
  for (int dim : {64, 128, 256}) {
    for (int rows : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
      ExpectLikeRef({DType::kBF16, dim, 1, 1, 16, 0, rows});
      ExpectLikeRef({DType::kBF16, dim, 3, 1, 64, 128 - rows % 128, rows});
    }
  }
}

// The recent range begins before the chunk, inside it, or at its end; lists reach into it.
TEST_F(AttendChunkCuda, EveryPageAndSelection) {
  for (int page : {16, 32, 64}) {
    for (Kind kind : {Kind::kAll, Kind::kWindow, Kind::kUnits, Kind::kTokens}) {
      for (bool per_head : {false, true}) {
        for (int unit : {16, 32, 64}) {
          if (unit != 16 && kind != Kind::kUnits) continue;
          const int dim = 64 << Below(rng_, 3);
          const DType dtype = Below(rng_, 2) == 0 ? DType::kBF16 : DType::kF16;
          ExpectLikeRef({dtype, dim, 1 + Below(rng_, 8), 1 + Below(rng_, 4), page, Below(rng_, 700),
                         1 + Below(rng_, 150), kind, unit, per_head});
        }
      }
    }
  }
}

TEST_F(AttendChunkCuda, EveryOutputType) {
  for (DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
    Case c{DType::kBF16, 128, 4, 2, 16, 300, 45};
    c.out_dtype = out;
    ExpectLikeRef(c);
  }
}

TEST_F(AttendChunkCuda, LongSequencesHaveManySplits) {
  ExpectLikeRef({DType::kBF16, 128, 7, 1, 16, 30000, 19});
  ExpectLikeRef({DType::kF16, 64, 1, 1, 64, 40001, 67});
  ExpectLikeRef({DType::kBF16, 256, 2, 1, 32, 9000, 33});
}

TEST_F(AttendChunkCuda, LongChunksHaveManyTiles) {
  ExpectLikeRef({DType::kBF16, 64, 8, 2, 16, 0, 700});
  ExpectLikeRef({DType::kBF16, 128, 7, 4, 16, 1500, 130, Kind::kTokens});
}

TEST_F(AttendChunkCuda, TwoRunsGiveTheSameBits) {
  Problem p(rng_, {DType::kBF16, 128, 4, 8, 16, 3000, 200});
  Check(kvs_cuda_ops()->attend_chunk(p.Work(), nullptr), "attend_chunk");
  const auto first = p.Output();
  for (int i = 0; i < 5; ++i) {
    p.Poison();
    Check(kvs_cuda_ops()->attend_chunk(p.Work(), nullptr), "attend_chunk");
    EXPECT_EQ(p.Output(), first) << TestSeed();
  }
}

TEST_F(AttendChunkCuda, SeveralChunksAreOne) {
  for (Kind kind : {Kind::kAll, Kind::kUnits, Kind::kTokens}) {
    const int32_t rows = 300;
    Case c{DType::kBF16, 128, 4, 2, 16, 500, rows, kind};
    c.per_head = true;
    Problem p(rng_, c);
    p.Poison();
    for (int32_t first = 0, cut; first < rows; first += cut) {
      cut = std::min(1 + Below(rng_, 120), rows - first);
      Check(kvs_cuda_ops()->attend_chunk(p.Work(first, cut), nullptr), "attend_chunk");
    }
    p.ExpectLikeRef();
    const Attention cut = p.Got();
    p.RunAndExpectLikeRef();
    EXPECT_LE(RelativeError(cut.out, p.Got().out), 3e-3) << Describe(c);
  }
}

// One captured graph serves all lengths: counters are back at 0 after each replay.
TEST_F(AttendChunkCuda, GraphReplaysWhileTokensGrow) {
  Problem p(rng_, {DType::kBF16, 128, 4, 2, 16, 2000, 70});
  CapturedGraph graph(
      [&](Stream stream) { return kvs_cuda_ops()->attend_chunk(p.Work(), stream); });
  for (int32_t before : {0, 1, 58, 700, 2000, 31}) {
    p.MoveTo(before);
    p.Poison();
    Check(cudaDeviceSynchronize(), "before a replay");
    graph.Replay();
    p.ExpectLikeRef();
  }
}

TEST_F(AttendChunkCuda, RefusesShapesItHasNot) {
  const Problem p(rng_, {DType::kBF16, 128, 4, 2, 16, 10, 5});
  AttendChunkBatch w = p.Work();
  w.group = 9;
  EXPECT_NE(kvs_cuda_ops()->attend_chunk(w, nullptr), 0);
  w = p.Work();
  w.layer.head_dim = 96;
  EXPECT_NE(kvs_cuda_ops()->attend_chunk(w, nullptr), 0);
  w = p.Work();
  w.scale = 0;
  EXPECT_NE(kvs_cuda_ops()->attend_chunk(w, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
