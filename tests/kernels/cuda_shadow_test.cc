// SPDX-License-Identifier: Apache-2.0
// CudaShadow on a table of ops that is a GPU in host memory: attention over a selection is computed
// as its op says, selections are made up. What is measured is held to ShadowAttention, given the
// same positions. What real kernels measure: tests/cuda/recall_cuda_test.cc.
#include "kernels/step/gpu/cuda_shadow.h"

#include "kernels/step/gpu/cuda_step.h"
#include "tests/fakes/attending_gpu.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 61;
constexpr int32_t kPrompt = 300;

Geometry Shape() {
  Geometry g{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64};
  g.dtype = DType::kBF16;
  return g;
}

class CudaShadowTest : public ::testing::Test {
 protected:
  CudaShadowTest() { testing::failing = -1; }

  // A prompt of raw rows, and the decode token's, which the fake's append would write.
  void Hold(const std::string& plan) { Hold(PlanOf(plan)); }
  void Hold(const Plan& plan) {
    sequence_ = std::make_unique<CodecSequence>(plan, g_, in_);
    sequence_->keep_pages = true;
    sequence_->Commit(kPrompt);
    std::vector<float> nats;
    for (int t = 0; t < kPrompt; ++t) nats.push_back(t % 9 == 0 ? 9.0f : 0.1f);
    sequence_->Report(nats);
    sequence_->PrefillDone();
    if (plan.codec != CodecKind::kRaw) sequence_->Settle();
    state_ = std::make_unique<SequenceState>(g_, plan, kPrompt, kPrompt);
    ASSERT_TRUE(state_->Report(0, kPrompt, nats.data(), nullptr, nullptr).ok());
    ASSERT_TRUE(state_->ClosePrompt().ok());
    view_ = sequence_->View();
    ASSERT_TRUE(state_->Refresh(view_).ok());
    sequence_->Commit(kPrompt + 1);
    view_ = sequence_->View();
    view_.tokens = kPrompt;
    blocks_.assign(static_cast<size_t>(state_->index().BlocksFor(kPrompt)),
                   Bytes(static_cast<size_t>(state_->index().block_bytes)));
    for (Bytes& block : blocks_) addresses_.push_back(block.data());
    view_.index_blocks = addresses_.data();
  }
  // The decode token, in all layers; queries in bf16.
  std::unique_ptr<CudaStep> Decode(CudaShadow* shadow, bool* capturing = nullptr) {
    auto begun = CudaStep::Begin({{state_.get(), view_, 1}}, &workspace_, capturing, {});
    EXPECT_TRUE(begun.ok()) << begun.status().ToString();
    if (!begun.ok()) return nullptr;
    std::unique_ptr<CudaStep> step = std::move(*begun);
    if (shadow != nullptr) step->Shadow(0, shadow);
    if (capturing != nullptr) *capturing = true;
    positions_.clear();
    for (int layer = 0; layer < g_.layers; ++layer) {
      const int64_t row = g_.head_dim * 2;
      EXPECT_TRUE(step->Append(layer, {kv_.data(), g_.kv_heads * row, row, DType::kBF16},
                               {kv_.data(), g_.kv_heads * row, row, DType::kBF16})
                      .ok());
      const Status attended =
          step->Attend(layer, {Queries(layer).data(), g_.query_heads * row, row, DType::kBF16},
                       {out_.data(), g_.query_heads * row, row, DType::kBF16}, nullptr);
      EXPECT_TRUE(attended.ok()) << attended.ToString();
      if (capturing != nullptr) continue;
      const Result<Selection> selection = step->ReadSelection(0);
      EXPECT_TRUE(selection.ok());
      auto& groups = positions_.emplace_back();
      for (int i = 0; i < GroupsOf(*selection); ++i) {
        groups.push_back(PositionsOf(*selection, state_->stored(), i));
      }
    }
    if (capturing != nullptr) *capturing = false;
    return step;
  }
  std::vector<BF16>& QueriesOf(int layer) { return queries_[static_cast<size_t>(layer)]; }
  std::span<const std::byte> Queries(int layer) {
    queries_.resize(static_cast<size_t>(g_.layers));
    std::vector<BF16>& q = QueriesOf(layer);
    q.clear();
    for (int h = 0; h < g_.query_heads; ++h) {
      for (int c = 0; c < g_.head_dim; ++c) {
        q.push_back(FromFloat<BF16>(in_.Query(kPrompt, layer, h)[c]));
      }
    }
    return std::as_bytes(std::span(q));
  }
  // What ShadowAttention finds at the positions that were read.
  ShadowSample Wanted(const std::vector<std::vector<float>>& outputs) {
    ShadowAttention shadow({state_.get(), view_, 1}, **FindBackend("ref"), InlineExecutor());
    for (int layer = 0; layer < g_.layers; ++layer) {
      std::vector<float> q(in_.Query(kPrompt, layer, 0),
                           in_.Query(kPrompt, layer, 0) + g_.query_heads * g_.head_dim);
      shadow.Measure(layer, q.data(), outputs[static_cast<size_t>(layer)].data(),
                     positions_[static_cast<size_t>(layer)]);
    }
    return shadow.sample();
  }
  void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
  }

  const Geometry g_ = Shape();
  const Inputs in_{g_, kPrompt + 2, kSeed};
  CudaWorkspace workspace_{testing::FakeOps(), g_};
  std::unique_ptr<CodecSequence> sequence_;
  std::unique_ptr<SequenceState> state_;
  SequenceView view_;
  std::vector<Bytes> blocks_;
  std::vector<std::byte*> addresses_;
  alignas(16) std::array<std::byte, 4096> kv_{};
  alignas(16) std::array<std::byte, 4096> out_{};
  std::vector<std::vector<BF16>> queries_;
  std::vector<std::vector<std::vector<kvstrata::Run>>> positions_;  // by layer and group
};

TEST_F(CudaShadowTest, OfFullAttentionFindsNothingLost) {
  ASSERT_NO_FATAL_FAILURE(Hold("full"));
  const auto shadow = *CudaShadow::Make(testing::FakeOps(), g_);
  const auto step = Decode(shadow.get());
  ASSERT_TRUE(step->End(nullptr).ok());
  const ShadowSample sample = shadow->Read();
  EXPECT_EQ(sample.layers, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(sample.recall, std::vector<float>(12, 1.0f));
  EXPECT_EQ(sample.error, std::vector<float>(12, 0.0f));
}

TEST_F(CudaShadowTest, OfRawRowsIsWhatShadowAttentionFinds) {
  ASSERT_NO_FATAL_FAILURE(Hold("quest{budget = 96, min_tokens = 0}"));
  const auto shadow = *CudaShadow::Make(testing::FakeOps(), g_);
  const auto step = Decode(shadow.get());
  ASSERT_TRUE(step->End(nullptr).ok());
  ASSERT_EQ(positions_[0].size(), 2u);
  ASSERT_NE(positions_[0][0], positions_[0][1]) << "heads select alike: nothing is told apart";
  // The plan's outputs are attention over the positions.
  std::vector<std::vector<float>> outputs;
  for (int layer = 0; layer < g_.layers; ++layer) {
    SequenceState raw(g_, Plan(), kPrompt, 0);
    SequenceView view = view_;
    view.index_blocks = nullptr;
    Step full({{&raw, view, 1}}, **FindBackend("ref"), InlineExecutor());
    Selection chosen;
    chosen.Reset(kPrompt + 1, static_cast<int>(positions_[static_cast<size_t>(layer)].size()));
    chosen.runs = positions_[static_cast<size_t>(layer)];
    full.Choose(layer, chosen);
    std::vector<float>& out = outputs.emplace_back(size_t{6} * 64);
    const Rows q = in_.Packed(in_.queries, g_.query_heads, kPrompt, layer);
    full.Attend(layer, q,
                {reinterpret_cast<std::byte*>(out.data()), 6 * 64 * 4, 64 * 4, DType::kF32},
                nullptr);
  }
  const ShadowSample want = Wanted(outputs), got = shadow->Read();
  EXPECT_EQ(got.layers, want.layers);
  ExpectNear(got.recall, want.recall, 1e-4f);
  ExpectNear(got.error, want.error, 1e-3f);
  for (const float recall : got.recall) EXPECT_LT(recall, 0.99f);
}

// The fakes' outputs of packed rows and of spans are zeros: all of the output is lost, and of the
// mass what lies outside of the positions.
class CudaShadowOfCodec : public CudaShadowTest {
 protected:
  void Check(size_t groups) {
    const auto shadow = *CudaShadow::Make(testing::FakeOps(), g_);
    const auto step = Decode(shadow.get());
    ASSERT_NE(step, nullptr);
    ASSERT_TRUE(step->End(nullptr).ok());
    ASSERT_FALSE(shadow->lost());
    ASSERT_EQ(positions_[0].size(), groups);
    ASSERT_NE(positions_[0].front(), positions_[0].back()) << "nothing is told apart";
    const ShadowSample want = Wanted({std::vector<float>(384), std::vector<float>(384)});
    const ShadowSample got = shadow->Read();
    EXPECT_EQ(got.layers, want.layers);
    ExpectNear(got.recall, want.recall, 1e-4f);
    ExpectNear(got.error, want.error, 1e-3f);
    for (const float recall : got.recall) EXPECT_LT(recall, 0.99f);
  }
};

TEST_F(CudaShadowOfCodec, PackedReadsListsOfKvHeads) {
  ASSERT_NO_FATAL_FAILURE(
      Hold("mosaickv{max_loss = 1, segment = 96, buffer = 32, share = 0.25, min_tokens = 0}"));
  ASSERT_NE(state_->stored(), nullptr);
  ASSERT_NO_FATAL_FAILURE(Check(2));
}

#ifndef KVS_WITHOUT_SEKV
TEST_F(CudaShadowOfCodec, SpansReadListsOfQueryHeads) {
  ASSERT_NO_FATAL_FAILURE(
      Hold("sekv{max_loss = 1, r_max = 8, d_route = 16, local = 30, min_tokens = 0, rows = 100}"));
  ASSERT_NE(SpansOf(state_->stored()), nullptr);
  ASSERT_GT(SpansOf(state_->stored())->spans().size(), 8u);
  ASSERT_NO_FATAL_FAILURE(Check(6));
}
#endif

TEST_F(CudaShadowTest, OfCapturedLayersMeasuresNothing) {
  ASSERT_NO_FATAL_FAILURE(Hold("full"));
  const auto shadow = *CudaShadow::Make(testing::FakeOps(), g_);
  bool capturing = false;  // the stream
  auto step = Decode(shadow.get(), &capturing);
  EXPECT_TRUE(shadow->captured());
  ASSERT_TRUE(step->End(&capturing).ok());
  // And so does what is replayed.
  step.reset();
  sequence_->Commit(kPrompt + 2);
  view_ = sequence_->View();
  view_.tokens = kPrompt + 1;
  const auto other = *CudaShadow::Make(testing::FakeOps(), g_);
  auto replayed = CudaStep::Begin({{state_.get(), view_, 1}}, &workspace_, &capturing, {});
  ASSERT_TRUE(replayed.ok()) << replayed.status().ToString();
  (*replayed)->Shadow(0, other.get());
  EXPECT_FALSE(other->captured());
  ASSERT_TRUE((*replayed)->Replay().ok());
  EXPECT_TRUE(other->captured());
}

TEST_F(CudaShadowTest, ThatFailsLosesTheSampleAndNoStep) {
  ASSERT_NO_FATAL_FAILURE(Hold("full"));
  const auto shadow = *CudaShadow::Make(testing::FakeOps(), g_);
  testing::failing = 1;  // the step's own attention of the first layer
  auto begun = CudaStep::Begin({{state_.get(), view_, 1}}, &workspace_, nullptr, {});
  ASSERT_TRUE(begun.ok());
  (*begun)->Shadow(0, shadow.get());
  const int64_t row = g_.head_dim * 2;
  const Status attended =
      (*begun)->Attend(0, {Queries(0).data(), g_.query_heads * row, row, DType::kBF16},
                       {out_.data(), g_.query_heads * row, row, DType::kBF16}, nullptr);
  EXPECT_TRUE(attended.ok()) << attended.ToString();
  EXPECT_TRUE(shadow->lost());
}

}  // namespace
}  // namespace kvstrata
