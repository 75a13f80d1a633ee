// SPDX-License-Identifier: Apache-2.0
// Which words a step on a GPU gives to the ops that write its members' rows, on a table of ops that
// is a GPU in host memory and notes every row.
#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "kernels/step/gpu/cuda_step.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 71;

int appended = 0, attended = 0;  // batches of new rows

void NoteAll(const cuda::NotFiniteWords& words, int32_t batch) {
  for (int32_t b = 0; b < batch && words.words != nullptr; ++b) ++words.words[words.of[b]];
}

cuda::CudaOps Ops() {
  cuda::CudaOps ops = testing::FakeOps();
  ops.append = [](const cuda::AppendBatch& w, cuda::Stream) {
    ++appended;
    NoteAll(w.not_finite, w.batch);
    return 0;
  };
  ops.attend_raw = [](const cuda::AttendRawBatch& w, cuda::Stream) {
    if (w.new_k.data == nullptr) return 0;
    ++attended;
    NoteAll(w.not_finite, w.batch);
    return 0;
  };
  return ops;
}

// Sequences of two plans, so that a step has two parts, with a complete prompt.
struct Batch {
  Batch() {
    for (const char* plan : {"full", "full", "window{n_sink = 4, n_recent = 16, min_tokens = 0}"}) {
      auto& s = sequences.emplace_back(std::make_unique<HeldSequence>(g, plan));
      RunTo(*s, in, 40, 40, Backends().front());
      EXPECT_TRUE(s->state->ClosePrompt().ok());
    }
  }
  std::unique_ptr<CudaStep> Begin(const std::vector<int32_t>& slots) {
    std::vector<StepMember> members;
    for (size_t i = 0; i < slots.size(); ++i) {
      HeldSequence& s = *sequences[i];
      members.push_back({s.state.get(), s.View(1), 1, true, slots[i]});
      EXPECT_TRUE(s.state->Refresh(members.back().view).ok());
    }
    auto begun = CudaStep::Begin(std::move(members), &workspace, &capturing, {});
    EXPECT_TRUE(begun.ok()) << begun.status().ToString();
    return std::move(begun).value();
  }
  void RunLayers(CudaStep* step) {
    const int64_t row = g.head_dim * 2;
    const Rows rows{tensor.data(), g.query_heads * row, row, DType::kBF16};
    const MutableRows to{out.data(), g.query_heads * row, row, DType::kBF16};
    for (int layer = 0; layer < g.layers; ++layer) {
      EXPECT_TRUE(step->Append(layer, rows, rows).ok());
      EXPECT_TRUE(step->Attend(layer, rows, to, nullptr).ok());
    }
  }

  const Geometry g{
      .layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64, .dtype = DType::kBF16};
  const Inputs in{g, 50, kSeed};
  const cuda::CudaOps ops = Ops();
  std::array<uint32_t, 8> words{};
  bool capturing = false;
  std::vector<std::unique_ptr<HeldSequence>> sequences;
  CudaWorkspace workspace{ops, g, 0, nullptr, words.data()};
  alignas(16) std::array<std::byte, 8192> tensor{}, out{};
};

TEST(CudaNotFinite, EachMemberHasAWordOfItsOwn) {
  Batch batch;
  appended = attended = 0;
  batch.RunLayers(batch.Begin({6, 1, 3}).get());
  EXPECT_EQ(appended, 2);
  EXPECT_EQ(batch.words, (std::array<uint32_t, 8>{0, 2, 0, 2, 0, 0, 2, 0}));
  batch.words = {};
  batch.RunLayers(batch.Begin({2, 5, 2}).get());  // others of the same batch
  EXPECT_EQ(batch.words, (std::array<uint32_t, 8>{0, 0, 4, 0, 0, 2, 0, 0}));
  EXPECT_EQ(attended, 0);
}

// Under capture attention writes the new rows, of each part by itself.
TEST(CudaNotFinite, CapturedAttentionNotesToo) {
  Batch batch;
  batch.RunLayers(batch.Begin({0, 0, 0}).get());  // all buffers are there
  batch.words = {};
  appended = attended = 0;
  const auto step = batch.Begin({6, 1, 3});
  batch.capturing = true;
  batch.RunLayers(step.get());
  batch.capturing = false;
  EXPECT_EQ(appended, 0);
  EXPECT_EQ(attended, 4);
  EXPECT_EQ(batch.words, (std::array<uint32_t, 8>{0, 2, 0, 2, 0, 0, 2, 0}));
}

TEST(CudaNotFinite, NobodyNeedsToAsk) {
  Batch batch;
  CudaWorkspace other(batch.ops, batch.g);
  HeldSequence& s = *batch.sequences[0];
  StepMember member{s.state.get(), s.View(1), 1};
  EXPECT_TRUE(s.state->Refresh(member.view).ok());
  auto step = CudaStep::Begin({member}, &other, &batch.capturing, {});
  ASSERT_TRUE(step.ok());
  batch.RunLayers(step->get());
  EXPECT_EQ(batch.words, (std::array<uint32_t, 8>{}));
}

}  // namespace
}  // namespace kvstrata
