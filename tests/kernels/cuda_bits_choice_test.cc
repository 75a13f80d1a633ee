// SPDX-License-Identifier: Apache-2.0
// Which ops choose for `bits` on a GPU: pick_bits where lists are long and many, vote and pick
// elsewhere, always, vote, take and pick with max_missed. On a table of ops that is a GPU in host
// memory.
#include "kernels/step/gpu/cuda_step.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr int32_t kPrompt = 300;
constexpr int64_t kScratch = 64;

int votes = 0, one_passes = 0, always = 0, takes = 0;
int32_t longest_of_op = 1 << 30;  // that pick_bits takes
cuda::VoteBatch voted;            // the last ones
cuda::PickBatch picked;

int Vote(const cuda::VoteBatch& w, cuda::Stream) {
  voted = w;
  ++votes;
  return 0;
}

int Always(const cuda::AlwaysBatch& w, cuda::Stream) {
  EXPECT_NE(w.always, nullptr);
  ++always;
  return 0;
}

int Take(const cuda::TakeBatch& w, cuda::Stream) {
  EXPECT_EQ(votes, 1);
  ++takes;
  std::fill_n(w.takes, int64_t{w.batch} * w.groups, 1);
  return 0;
}

int PickBits(const cuda::PickBitsBatch& w, cuda::Stream stream) {
  EXPECT_NE(w.vote.scratch, nullptr);
  EXPECT_LE(w.vote.candidate_stride, longest_of_op);
  ++one_passes;
  cuda::PickBatch pick = w.pick;
  pick.batch = w.vote.batch;
  pick.groups = w.vote.groups.kv_heads;
  pick.rule = w.vote.rule;
  pick.tokens = w.vote.tokens;
  return testing::PickEveryThird(pick, stream);
}

int Pick(const cuda::PickBatch& w, cuda::Stream stream) {
  picked = w;
  return testing::PickEveryThird(w, stream);
}

cuda::CudaOps Ops(bool has_op) {
  cuda::CudaOps ops = testing::FakeOps();
  ops.vote = Vote;
  ops.always = Always;
  ops.pick = Pick;
  ops.take = Take;
  ops.quantise_keys = testing::Nothing<cuda::QuantiseKeysBatch>;
  ops.pick_bits = has_op ? PickBits : nullptr;
  ops.pick_bits_scratch_bytes = [](const cuda::PickBitsBatch& w) {
    return w.vote.candidate_stride <= longest_of_op ? kScratch : 0;
  };
  return ops;
}

class CudaBitsChoice : public ::testing::Test {
 protected:
  CudaBitsChoice() {
    g_.dtype = DType::kBF16;
    longest_of_op = 1 << 30;
    sequence_.keep_pages = true;
    sequence_.Commit(kPrompt);
    sequence_.PrefillDone();
    sequence_.Commit(kPrompt + 1);
    view_ = sequence_.View();
    view_.tokens = kPrompt;
    EXPECT_TRUE(state_.ClosePrompt().ok());
    EXPECT_TRUE(state_.Refresh(view_).ok());
    blocks_.assign(static_cast<size_t>(state_.index().BlocksFor(kPrompt)),
                   Bytes(static_cast<size_t>(state_.index().block_bytes)));
    for (Bytes& block : blocks_) addresses_.push_back(block.data());
    view_.index_blocks = addresses_.data();
  }

  // Appends and attends a token of each member.
  void RunStep(const std::vector<StepMember>& members, CudaWorkspace* workspace) {
    votes = one_passes = always = takes = 0;
    auto step = CudaStep::Begin(members, workspace, nullptr, {});
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    const int64_t row = g_.head_dim * 2;
    const Rows rows{tensor_.data(), g_.query_heads * row, row, DType::kBF16};
    ASSERT_TRUE((*step)->Append(0, rows, rows).ok());
    const Status attended =
        (*step)->Attend(0, rows, {out_.data(), g_.query_heads * row, row, DType::kBF16}, nullptr);
    ASSERT_TRUE(attended.ok()) << attended.ToString();
  }

  // Whether a step selects by op pick_bits, in a workspace with room for so many tokens.
  bool InOnePass(CudaWorkspace* workspace) {
    RunStep({{&state_, view_, 1}}, workspace);
    EXPECT_EQ(votes + one_passes, 1);
    return one_passes == 1;
  }
  bool InOnePass(int32_t tokens, bool has_op = true) {
    const cuda::CudaOps ops = Ops(has_op);
    CudaWorkspace workspace(ops, g_, tokens);
    return InOnePass(&workspace);
  }

  Geometry g_{.layers = 1, .query_heads = 32, .kv_heads = 8, .head_dim = 64};
  const Plan plan_ = PlanOf("bits{budget = 96, min_tokens = 0}");
  Inputs in_{g_, kPrompt + 2, 71};
  CodecSequence sequence_{plan_, g_, in_};
  SequenceState state_{g_, plan_, kPrompt, kPrompt};
  SequenceView view_;
  std::vector<Bytes> blocks_;
  std::vector<std::byte*> addresses_;
  alignas(16) std::array<std::byte, 2 * 4096> tensor_{};
  alignas(16) std::array<std::byte, 2 * 4096> out_{};
};

TEST_F(CudaBitsChoice, IsOnePassOfManyCandidates) {
  EXPECT_FALSE(InOnePass(32 << 10));
  EXPECT_FALSE(InOnePass(128 << 10));  // 8 KV heads have too few together
  EXPECT_TRUE(InOnePass(1 << 20));
}

TEST_F(CudaBitsChoice, IsVoteAndPickWhereTheOpIsNot) {
  EXPECT_FALSE(InOnePass(1 << 20, false));
  longest_of_op = (1 << 20) - 1;
  EXPECT_FALSE(InOnePass(1 << 20));
}

TEST_F(CudaBitsChoice, MaxMissedHasListsOfItsOwnBesideOnePass) {
  SequenceState missed(g_, PlanOf("bits{max_missed = 0.01, min_tokens = 0}"), kPrompt, kPrompt);
  ASSERT_TRUE(missed.ClosePrompt().ok());
  ASSERT_TRUE(missed.Refresh(view_).ok());
  const cuda::CudaOps ops = Ops(true);
  CudaWorkspace workspace(ops, g_, 1 << 20);
  ASSERT_NO_FATAL_FAILURE(RunStep({{&state_, view_, 1}, {&missed, view_, 1}}, &workspace));
  EXPECT_EQ(one_passes, 1);
  EXPECT_EQ(always, 1);
  EXPECT_EQ(votes, 1);
  EXPECT_EQ(takes, 1);
  ASSERT_NO_FATAL_FAILURE(RunStep({{&missed, view_, 1}}, &workspace));
  EXPECT_EQ(one_passes, 0);
  EXPECT_EQ(takes, 1);
}

// Op pick has an eighth of what a vote makes sums of to choose among.
TEST_F(CudaBitsChoice, RunsHaveListsOfTheirOwnBesideOnePass) {
  SequenceState runs(g_, PlanOf("bits{run = 8, budget = 97, min_tokens = 0}"), kPrompt, kPrompt);
  ASSERT_TRUE(runs.ClosePrompt().ok());
  ASSERT_TRUE(runs.Refresh(view_).ok());
  const cuda::CudaOps ops = Ops(true);
  CudaWorkspace workspace(ops, g_, 1 << 20);
  ASSERT_NO_FATAL_FAILURE(RunStep({{&state_, view_, 1}, {&runs, view_, 1}}, &workspace));
  EXPECT_EQ(one_passes, 1);
  EXPECT_EQ(votes, 1);
  EXPECT_EQ(takes, 0);
  EXPECT_EQ(picked.rule.unit_tokens, 8);
  EXPECT_EQ(picked.rule.take, 12);
  EXPECT_EQ(picked.score_stride, voted.candidate_stride / 8);
}

}  // namespace
}  // namespace kvstrata
