// SPDX-License-Identifier: Apache-2.0
// Attention over an engine's own blocks: which rows each step attends, whatever becomes of blocks.
// On a table of ops that is a GPU in host memory; tests/cuda has the same on a GPU.
#include "kernels/blocks/block_attention.h"

#include <gmock/gmock.h>

#include "tests/fakes/block_gpu.h"
#include "tests/kernels/block_exercise.h"

namespace kvstrata {
namespace {

struct Case {
  const char* plan;
  int32_t block_tokens;
};

class BlockAttentionTest : public ::testing::TestWithParam<Case> {
 protected:
  Random random_;
  const cuda::CudaOps ops_ = testing::BlockOps();
};

constexpr Case kCases[] = {
    {"full", 16},
    {"window{n_sink = 4, n_recent = 40, min_tokens = 0}", 32},
    {"quest{budget = 64, min_tokens = 0}", 16},
    {"quest{budget = 64, min_tokens = 150}", 128},
    {"quest{budget = 32, page = 8, n_sink = 8, n_recent = 8, min_tokens = 0}", 16},
    {"quest{budget = 64, group = \"softmax\", n_dense_layers = 1, min_tokens = 0}", 64},
    {"bits{budget = 40, min_tokens = 0}", 64},
    {"bits{budget = 24, unit = 32, recent = 32, bits = 3, min_tokens = 0}", 128},
    {"quest{budget = 64, score = \"deviation\", min_tokens = 0}", 32},
    {"bits{budget = 40, run = 8, min_tokens = 0}", 64},
    {"tokenselect{k = 30, n_init = 8, n_local = 16, min_tokens = 0}", 32},
};
INSTANTIATE_TEST_SUITE_P(Plans, BlockAttentionTest, ::testing::ValuesIn(kCases));

TEST_P(BlockAttentionTest, StepsAttendWhatThePlanSays) {
  SCOPED_TRACE(random_.Trace());
  BlockEngineOptions options{.plan = GetParam().plan, .block_tokens = GetParam().block_tokens};
  options.slots_first = random_.Below(2) == 0;
  options.apart = random_.Below(2) == 0;
  BlockEngine engine(ops_, &random_, options);
  EXPECT_LT(Exercise(&engine, &random_, 60), 1e-2);
  EXPECT_GT(engine.oracle().compared(), 5 * engine.oracle().near_ties());
}

BlockShape SmallShape() {
  BlockShape shape;
  shape.geometry = {2, 4, 2, 64, 16, DType::kBF16, {}, 0};
  shape.block_stride = 16 << 10;
  shape.head_stride = 4096;
  shape.slot_stride = 256;
  shape.value_offset = 128;
  shape.index_offset = 8192;
  shape.max_rows = shape.max_decodes = 2;
  shape.max_tokens = 256;
  return shape;
}

std::string WhyNot(const BlockShape& shape, std::string_view plan) {
  const cuda::CudaOps ops = testing::BlockOps();
  const auto made = BlockAttention::Make(ParsePlan(plan).value(), shape, ops);
  return made.ok() ? "" : std::string(made.status().reason()) + ": " + made.status().message();
}

TEST(BlockAttentionErrors, NameFieldAndValue) {
  EXPECT_EQ(WhyNot(SmallShape(), "quest"), "");
  BlockShape shape = SmallShape();
  shape.block_tokens = 48;
  EXPECT_THAT(WhyNot(shape, "full"), ::testing::HasSubstr("BLOCK_SHAPE: block_tokens = 48"));
  shape = SmallShape();
  shape.value_offset = 130;
  EXPECT_THAT(WhyNot(shape, "full"), ::testing::HasSubstr("BLOCK_SHAPE: value_offset = 130"));
  shape = SmallShape();
  shape.geometry.dtype = DType::kF32;
  EXPECT_THAT(WhyNot(shape, "full"), ::testing::HasSubstr("CUDA_MODEL: dtype f32"));
  shape = SmallShape();
  shape.max_rows = 0;
  EXPECT_THAT(WhyNot(shape, "full"), ::testing::HasSubstr("BLOCK_SHAPE: max_rows = 0"));
}

TEST(BlockAttentionErrors, PlansThatAreNotServed) {
  for (const char* plan : {"chess", "sekv", "sentencekv", "mosaickv", "bits{max_missed = 0.01}"}) {
    EXPECT_THAT(WhyNot(SmallShape(), plan), ::testing::HasSubstr("BLOCK_PLAN: plan")) << plan;
  }
  EXPECT_THAT(WhyNot(SmallShape(), "bits"),
              ::testing::HasSubstr("BLOCK_TOKENS: a block has 16 tokens"));
}

TEST(BlockAttentionErrors, CallsOutOfOrder) {
  const cuda::CudaOps ops = testing::BlockOps();
  const auto attention = BlockAttention::Make(ParsePlan("full").value(), SmallShape(), ops).value();
  EXPECT_EQ(attention->Begin({}, nullptr).reason(), "BLOCK_UNBOUND");
  std::vector<std::byte> workspace(static_cast<size_t>(attention->workspace_bytes()));
  const std::vector<uint64_t> layers = {4096, 8192};
  EXPECT_EQ(attention->Bind(std::span(layers).first(1), workspace.data()).reason(), "BLOCK_LAYERS");
  ASSERT_TRUE(attention->Bind(layers, workspace.data()).ok());
  float lse[8], rows[8 * 64];
  EXPECT_EQ(attention->Audit(0, {rows, lse}, nullptr).reason(), "BLOCK_SAMPLE");
  EXPECT_EQ(attention->Begin({.rows = 1, .sampled = 1}, nullptr).reason(), "BLOCK_ROWS");
  EXPECT_EQ(attention->Attend(2, {}, nullptr, 1, nullptr).reason(), "BLOCK_LAYERS");
  EXPECT_EQ(attention->Attend(0, {}, nullptr, 3, nullptr).reason(), "BLOCK_ROWS");
  EXPECT_EQ(attention->Attend(0, {workspace.data(), 8}, nullptr, 1, nullptr).reason(),
            "BLOCK_QUERIES");
}

}  // namespace
}  // namespace kvstrata
