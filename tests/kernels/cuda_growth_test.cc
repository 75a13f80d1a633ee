// SPDX-License-Identifier: Apache-2.0
// A workspace of steps on a GPU that could not grow, on a table of ops that is a GPU in host
// memory: what still fits is served as before, with tables, lists and scratch that are there.
#include "kernels/step/gpu/cuda_step.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 67;
constexpr int32_t kShort = 300, kLong = 2000;  // tokens of a prompt

int allocations_left = -1;  // that still succeed; negative: all do
int without_memory = 0;     // calls of ops that were given none

int AllocateSome(uint64_t bytes, void** at) {
  if (allocations_left == 0) return 1;
  if (allocations_left > 0) --allocations_left;
  return testing::Allocate(bytes, at);
}

void Expect(bool given) { without_memory += given ? 0 : 1; }

int Pick(const cuda::PickBatch& w, cuda::Stream stream) {
  Expect(w.scratch != nullptr && w.scores != nullptr);
  return w.lists == nullptr ? testing::PickEveryThird(w, stream) : 0;
}

// Lists pages 1 and 3.
int Cascade(const cuda::CascadeBatch& w, cuda::Stream) {
  for (int32_t b = 0; b < w.batch; ++b) {
    if (w.tokens[b] < 0) continue;
    w.counts[b] = 2;
    w.units[int64_t{b} * w.list_stride] = 1;
    w.units[int64_t{b} * w.list_stride + 1] = 3;
  }
  return 0;
}

int AttendPacked(const cuda::AttendPackedBatch& w, cuda::Stream stream) {
  for (int32_t b = 0; b < w.queries.batch; ++b) {
    const int64_t first = int64_t{b} * w.layer.segment_stride * w.layer.kv_heads;
    for (int64_t i = 0; i < int64_t{w.layer.counts[b]} * w.layer.kv_heads; ++i) {
      Expect(w.layer.segments[first + i].r_k != 0);
    }
  }
  return testing::FillPacked(w, stream);
}

int AttendSpans(const cuda::AttendSpansBatch& w, cuda::Stream stream) {
  for (int32_t b = 0; b < w.queries.batch; ++b) {
    for (int32_t i = 0; i < w.layer.counts[b]; ++i) {
      Expect(w.layer.parts[int64_t{b} * w.layer.part_stride + i].spans != 0);
    }
  }
  return testing::FillSpans(w, stream);
}

cuda::CudaOps Ops() {
  cuda::CudaOps ops = testing::FakeOps();
  ops.allocate_device = AllocateSome;
  ops.vote = testing::Nothing<cuda::VoteBatch>;
  ops.pick = Pick;
  ops.cascade = Cascade;
  static cuda::PackedOps packed = testing::kFakePacked;
  packed.attend_packed = AttendPacked;
  ops.packed = &packed;
  static cuda::SpanOps spans = testing::kFakeSpans;
  spans.attend_spans = AttendSpans;
  ops.lowrank = &spans;
  return ops;
}

Geometry Shape() {
  Geometry g{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64};
  g.dtype = DType::kBF16;
  return g;
}

// A prompt whose first token is to be decoded.
struct Held {
  Held(const Plan& plan, const Geometry& g, int32_t prompt)
      : in(g, prompt + 2, kSeed), sequence(plan, g, in), state(g, plan, prompt, prompt) {
    std::vector<float> nats;
    for (int t = 0; t < prompt; ++t) nats.push_back(t % 9 == 0 ? 9.0f : 0.1f);
    sequence.keep_pages = true;
    sequence.Commit(prompt);
    sequence.Report(nats);
    sequence.PrefillDone();
    if (plan.codec != CodecKind::kRaw) sequence.Settle();
    sequence.Commit(prompt + 1);
    view = sequence.View();
    view.tokens = prompt;
    EXPECT_TRUE(state.Report(0, prompt, nats.data(), nullptr, nullptr).ok());
    EXPECT_TRUE(state.ClosePrompt().ok());
    EXPECT_TRUE(state.Refresh(view).ok());
    blocks.assign(static_cast<size_t>(state.index().BlocksFor(prompt)),
                  Bytes(static_cast<size_t>(state.index().block_bytes)));
    for (Bytes& block : blocks) addresses.push_back(block.data());
    view.index_blocks = addresses.data();
  }

  Inputs in;
  CodecSequence sequence;
  SequenceState state;
  SequenceView view;
  std::vector<Bytes> blocks;
  std::vector<std::byte*> addresses;
};

class CudaGrowth : public ::testing::TestWithParam<const char*> {
 protected:
  CudaGrowth() {
    allocations_left = -1;
    without_memory = 0;
  }

  static Result<std::unique_ptr<CudaStep>> Begin(CudaWorkspace* workspace, Held* held) {
    return CudaStep::Begin({{&held->state, held->view, 1}}, workspace, nullptr, {});
  }

  // The units and runs that a step selects, which is not ended.
  std::pair<std::vector<std::vector<int32_t>>, std::vector<std::vector<kvstrata::Run>>> Selected(
      CudaWorkspace* workspace, Held* held) {
    auto step = Begin(workspace, held);
    EXPECT_TRUE(step.ok()) << step.status().ToString();
    if (!step.ok()) return {};
    const int64_t row = g_.head_dim * 2;
    const Rows rows{tensor_.data(), g_.query_heads * row, row, DType::kBF16};
    for (int layer = 0; layer < g_.layers; ++layer) {
      EXPECT_TRUE((*step)->Append(layer, rows, rows).ok());
      EXPECT_TRUE(
          (*step)
              ->Attend(layer, rows, {out_.data(), g_.query_heads * row, row, DType::kBF16}, nullptr)
              .ok());
    }
    const Result<Selection> selection = (*step)->ReadSelection(0);
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    if (!selection.ok()) return {};
    return {selection->units, selection->runs};
  }

  const Geometry g_ = Shape();
  const Plan plan_ = PlanOf(GetParam());
  const cuda::CudaOps ops_ = Ops();
  Held short_{plan_, g_, kShort}, long_{plan_, g_, kLong};
  alignas(16) std::array<std::byte, 4096> tensor_{};
  alignas(16) std::array<std::byte, 4096> out_{};
};

TEST_P(CudaGrowth, WhatFitsIsServedWhereMoreDidNot) {
  bool grew = false;
  int failed = 0;
  for (int most = 0; !grew; ++most) {
    ASSERT_LT(most, 100) << "allocations of a growth";
    CudaWorkspace workspace(ops_, g_);
    allocations_left = -1;
    const auto before = Selected(&workspace, &short_);
    allocations_left = most;
    const auto larger = Begin(&workspace, &long_);
    grew = larger.ok();
    if (!grew) {
      ++failed;
      EXPECT_EQ(larger.status().reason(), "GPU_MEMORY") << larger.status().ToString();
      allocations_left = -1;
      EXPECT_EQ(Selected(&workspace, &short_), before) << "after " << most << " allocations";
    }
    EXPECT_EQ(without_memory, 0) << "after " << most << " allocations";
    if (HasFailure()) return;
  }
  EXPECT_GT(failed, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Plans, CudaGrowth,
    ::testing::Values(
        "quest{budget = 96, min_tokens = 0}",
        "chess{page = 16, window = 2, trigger = \"every\", min_tokens = 0}",
        "tokenselect{k = 64, n_init = 16, n_local = 32, min_tokens = 0}",
        "mosaickv{max_loss = 1, segment = 96, buffer = 32, share = 0.25, min_tokens = 0}",
        "sekv{max_loss = 1, r_max = 8, d_route = 16, local = 30, min_tokens = 0, rows = 100}"));

}  // namespace
}  // namespace kvstrata
