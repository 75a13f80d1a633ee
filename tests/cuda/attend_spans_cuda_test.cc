// SPDX-License-Identifier: Apache-2.0
// attend_spans on the GPU, behind score_spans and expand_spans: outputs against ref.
#include "kernels/cpu/executor.h"
#include "kernels/ops/merge/merge.h"
#include "tests/cuda/checked_spans.h"

namespace kvstrata::cuda {
namespace {

class AttendSpansCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};
};

TEST_F(AttendSpansCuda, ShapesOfModels) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
        SpanCase c{.dim = dim, .group = group, .kv_heads = 1 + Below(rng_, 3), .dtype = dtype};
        c.parts = {{{60, 21}, {33, 0}}, {}, {{1, 1}}, {{90, 40}, {1, 17}, {0, 9}}};
        for (int b = 0; b < 4; ++b) c.room.push_back(Below(rng_, 500));
        c.out_dtype = group % 2 == 0 ? dtype : DType::kF32;
        c.trained = group % 3 != 0;
        CheckedSpans(rng_, c).ExpectLikeRef();
      }
    }
  }
}

TEST_F(AttendSpansCuda, RanksAndLengths) {
  for (const int rank_max : {0, 1, 2, 15, 16, 17, 32, 33, 64, 128}) {
    for (const int longest : {1, 16, 40, 300}) {
      SpanCase c{.group = 4, .rank_max = rank_max};
      c.longest = longest;
      c.parts = {{{25, 3}}};
      c.room = {kExpandAll};
      CheckedSpans(rng_, c).ExpectLikeRef();
      c.group = 6;
      c.dim = 64;
      CheckedSpans(rng_, c).ExpectLikeRef();
    }
  }
}

// More spans than fit into shared memory, and a batch of more items than SMs.
TEST_F(AttendSpansCuda, ManySpansAndManySequences) {
  SpanCase c{.dim = 64, .group = 2, .kv_heads = 1, .parts = {{{30000, 100}, {26000, 0}}}};
  c.longest = 9;
  c.rank_max = 2;
  c.room = {4000};
  CheckedSpans(rng_, c).ExpectLikeRef();
  c.group = 1;
  c.kv_heads = 3;
  c.parts.assign(64, {{40, 20}});
  c.room.assign(64, 60);
  CheckedSpans(rng_, c).ExpectLikeRef();
  c.longest = 2;
  c.parts.assign(64, {{40, 20}});
  c.parts[7] = {{2000, 0}, {300, 1}};
  c.room.assign(64, kExpandAll);
  CheckedSpans(rng_, c).ExpectLikeRef();
}

// As many as 1M tokens of 32 layers with 8 KV heads x 128 take and half as many more, some of them
// without spans or raw rows.
TEST_F(AttendSpansCuda, AsManyPartsAsThereMayBe) {
  SpanCase c{.parts = {{}, {{3, 1}}}, .room = {900, 5}};
  for (int i = 0; i < kSpanPartsMax; ++i) c.parts[0].push_back({Below(rng_, 4), Below(rng_, 4)});
  c.longest = 9;
  CheckedSpans(rng_, c).ExpectLikeRef();
}

TEST_F(AttendSpansCuda, OneGraphServesLaterSteps) {
  for (const bool ahead : {false, true}) {
    SpanCase c{.parts = {{{300, 50}}, {{120, 0}, {77, 5}}}, .room = {100, 200}};
    CheckedSpans problem(rng_, c, ahead);
    CapturedGraph graph([&](cudaStream_t stream) {
      problem.Enqueue(stream);
      return 0;
    });
    for (int i = 0; i < 5; ++i) {
      problem.Go(rng_);
      problem.ExpectReplayed(graph);
    }
  }
}

// Few rows and many spans, and the other way round: CTAs that have no rows, and none but rows.
TEST_F(AttendSpansCuda, ReadAhead) {
  for (const SpanPartShape shape : {SpanPartShape{2000, 3}, {3, 3000}, {0, 40}, {900, 900}}) {
    SpanCase c{.parts = {{shape}}, .room = {700}};
    CheckedSpans(rng_, c, true).ExpectLikeRef();
  }
}

// Op merge makes the output of it.
TEST_F(AttendSpansCuda, LeavesAPartial) {
  SpanCase c{.parts = {{{80, 9}}}, .room = {50}};
  CheckedSpans problem(rng_, c);
  problem.Enqueue(nullptr);
  const size_t rows = 8;
  const DeviceArray<float> m(rows), l(rows), o(rows * 128);
  AttendSpansBatch w = problem.Attention();
  const AttentionOutput direct = w.to;
  w.to = {};
  w.partial = {m.get(), l.get(), o.get(), 1};
  Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).attend_spans(w, nullptr), "attend_spans");
  const std::vector<float> host_m = m.Read(), host_l = l.Read(), host_o = o.Read();
  std::vector<float> got(rows * 128), want(rows * 128);
  MergeWork merge;
  merge.m = host_m.data();
  merge.l = host_l.data();
  merge.o = host_o.data();
  merge.parts = 1;
  merge.rows = rows;
  merge.dim = 128;
  merge.out = got.data();
  merge.out_token = 128;
  MergeRef(&merge, 1, InlineExecutor());
  Check(cudaMemcpy(want.data(), direct.rows, want.size() * 4, cudaMemcpyDeviceToHost), "output");
  EXPECT_LE(RelativeError(got, want), 1e-5);
}

TEST_F(AttendSpansCuda, RefusesOtherShapes) {
  const CudaOps& ops = *kvs_cuda_ops();
  const SpanCase c{.parts = {{{8, 2}}}, .room = {5}};
  const SpanProblem problem(rng_, c);
  AttendSpansBatch w = problem.Attention();
  w.layer.head_dim = w.pages.head_dim = 96;
  EXPECT_EQ(OpsOf<SpanOps>(ops.lowrank).attend_spans(w, nullptr), cudaErrorInvalidValue);
  w = problem.Attention();
  w.layer.group = 9;
  EXPECT_EQ(OpsOf<SpanOps>(ops.lowrank).attend_spans(w, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvstrata::cuda
