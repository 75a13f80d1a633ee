// SPDX-License-Identifier: Apache-2.0
// Plan strata over an engine's own blocks: what each step attends, gathers and seals, whatever
// becomes of blocks and slots. On a table of ops that is a GPU in host memory; tests/cuda has the
// same on a GPU.
#include "kernels/blocks/block_planes.h"

#include <gmock/gmock.h>

#include "tests/fakes/block_planes_gpu.h"
#include "tests/kernels/planes_exercise.h"

namespace kvstrata {
namespace {

constexpr const char* kPlans[] = {
    "strata{min_tokens = 0, fine_above = 7, recent = 32}",
    "strata{min_tokens = 150, fine_above = 7, recent = 20, sample = 2, keep = 4}",
    "strata{n_dense_layers = 1, min_tokens = 0, fine_above = 7, recent = 1, sinks = 0}",
    "strata{min_tokens = 150, fine_above = 7, recent = 20, sample = 2, lower = 'host'}",
    "strata{min_tokens = 0, fine_above = 7, recent = 32, keep = 4, lower = 'host', hot = 0}",
    "strata{min_tokens = 0, fine_above = 2, recent = 1, sinks = 0, lower = 'host', hot = 32}",
};

class BlockPlanesTest : public ::testing::TestWithParam<const char*> {
 protected:
  PlanesEngineOptions Options() {
    PlanesEngineOptions options{.plan = GetParam()};
    options.apart = random_.Below(2) == 0;
    options.dtype = random_.Below(2) == 0 ? DType::kBF16 : DType::kF16;
    return options;
  }
  Random random_;
  const cuda::CudaOps ops_ = testing::PlanesOps();
};
INSTANTIATE_TEST_SUITE_P(Plans, BlockPlanesTest, ::testing::ValuesIn(kPlans));

TEST_P(BlockPlanesTest, StepsAttendAndSealWhatTheyShould) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(ops_, &random_, Options());
  EXPECT_LT(ExercisePlanes(&engine, &random_, 40), 1e-2);
  EXPECT_GT(engine.oracle().compared(), 5 * engine.oracle().near_ties());
}

TEST_P(BlockPlanesTest, GroupsFillWhileDecoding) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(ops_, &random_, Options());
  EXPECT_LT(DecodePlanes(&engine, 64), 1e-2);
  EXPECT_GT(engine.oracle().compared(), 5 * engine.oracle().near_ties());
}

BlockPlanesShape SmallShape() {
  BlockPlanesShape shape;
  shape.geometry = {2, 4, 2, 128, 16, DType::kBF16, {}, 0};
  shape.block_stride = 2 * 64 * 268;
  shape.slots = shape.max_rows = 2;
  shape.max_tokens = 256;
  return shape;
}

std::string WhyNot(const BlockPlanesShape& shape, std::string_view plan) {
  const cuda::CudaOps ops = testing::PlanesOps();
  const auto made = BlockPlanes::Make(ParsePlan(plan).value(), shape, ops);
  return made.ok() ? "" : std::string(made.status().reason()) + ": " + made.status().message();
}

TEST(BlockPlanesErrors, NameFieldAndValue) {
  using ::testing::HasSubstr;
  EXPECT_EQ(WhyNot(SmallShape(), "strata"), "");
  BlockPlanesShape shape = SmallShape();
  shape.block_stride -= 32;
  EXPECT_THAT(WhyNot(shape, "strata"), HasSubstr("BLOCK_SHAPE: block_stride = 34272"));
  shape = SmallShape();
  shape.slots = 0;
  EXPECT_THAT(WhyNot(shape, "strata"), HasSubstr("BLOCK_SHAPE: slots = 0"));
  shape = SmallShape();
  shape.max_rows = 70000;
  EXPECT_THAT(WhyNot(shape, "strata"), HasSubstr("BLOCK_SHAPE: max_rows = 70000"));
  shape = SmallShape();
  shape.max_tokens = 0;
  EXPECT_THAT(WhyNot(shape, "strata"), HasSubstr("BLOCK_SHAPE: max_tokens = 0"));
  shape = SmallShape();
  shape.geometry.dtype = DType::kF32;
  EXPECT_THAT(WhyNot(shape, "strata"), HasSubstr("BLOCK_SHAPE: dtype = f32"));
}

TEST(BlockPlanesErrors, PlansThatAreNotServed) {
  using ::testing::HasSubstr;
  using ::testing::StartsWith;
  BlockPlanesShape shape = SmallShape();
  EXPECT_THAT(WhyNot(shape, "quest"), StartsWith("BLOCK_PLAN: plan \"quest\""));
  EXPECT_THAT(WhyNot(shape, "quest"), HasSubstr("; strata is, with"));
  EXPECT_THAT(WhyNot(shape, "strata{share = 0.05}"), StartsWith("BLOCK_PLAN: share = 0.05"));
  EXPECT_THAT(WhyNot(shape, "strata{unit = 128}"), StartsWith("BLOCK_PLAN: unit = 128"));
  shape.geometry.head_dim = 256;
  EXPECT_THAT(WhyNot(shape, "strata"), StartsWith("BLOCK_PLAN: head_dim = 256"));
  shape = SmallShape();
  shape.geometry.query_heads = 32;
  EXPECT_THAT(WhyNot(shape, "strata"), StartsWith("BLOCK_PLAN: 16 query heads a KV head"));
}

TEST(BlockPlanesErrors, CallsOutOfOrder) {
  const cuda::CudaOps ops = testing::PlanesOps();
  auto planes = BlockPlanes::Make(ParsePlan("strata").value(), SmallShape(), ops).value();
  EXPECT_EQ(planes->Begin({}, nullptr).reason(), "BLOCK_UNBOUND");
  const uint64_t odd[] = {64, 80};
  EXPECT_EQ(planes->Bind(odd, &planes).reason(), "BLOCK_LAYERS");
  const uint64_t one[] = {64};
  EXPECT_EQ(planes->Bind(one, &planes).reason(), "BLOCK_LAYERS");
  const uint64_t layers[] = {64, 128};
  EXPECT_EQ(planes->Bind(layers, nullptr).reason(), "BLOCK_WORKSPACE");
  std::vector<std::byte> workspace(static_cast<size_t>(planes->workspace_bytes()));
  ASSERT_TRUE(planes->Bind(layers, workspace.data()).ok());
  BlockPlanesBatch batch;
  batch.rows = 3;
  EXPECT_EQ(planes->Begin(batch, nullptr).reason(), "BLOCK_ROWS");
  alignas(16) std::byte rows[2048];
  const TokenRows good{rows, 1024};
  EXPECT_EQ(planes->Decode(2, {good, good, good}, rows, 1, nullptr).reason(), "BLOCK_LAYERS");
  EXPECT_EQ(planes->Decode(0, {good, good, good}, rows, 3, nullptr).reason(), "BLOCK_ROWS");
  EXPECT_EQ(planes->Decode(0, {good, good, {rows, 8}}, rows, 1, nullptr).reason(), "BLOCK_QUERIES");
  EXPECT_EQ(planes->Prompt(0, {0, 0, 4, good, good}, {rows, rows}, nullptr).reason(), "BLOCK_ROWS");
}

TEST(BlockPlanesErrors, LowerRunsThatAreNotBound) {
  using ::testing::HasSubstr;
  const cuda::CudaOps ops = testing::PlanesOps();
  const auto made = [&](std::string_view plan) {
    BlockPlanesShape shape = SmallShape();
    shape.block_stride = 2 * 64 * (plan == "strata" ? 268 : 102);
    return BlockPlanes::Make(ParsePlan(plan).value(), shape, ops).value();
  };
  const uint64_t layers[] = {64, 128}, odd[] = {64, 80};
  EXPECT_EQ(made("strata")->BindLower(layers).reason(), "BLOCK_LAYERS");  // they are in blocks
  const auto planes = made("strata{lower = 'host'}");
  std::vector<std::byte> workspace(static_cast<size_t>(planes->workspace_bytes()));
  ASSERT_TRUE(planes->Bind(layers, workspace.data()).ok());
  EXPECT_EQ(planes->Begin({}, nullptr).reason(), "BLOCK_UNBOUND");
  EXPECT_THAT(planes->Begin({}, nullptr).message(), HasSubstr("kvs_block_planes_bind_lower"));
  EXPECT_EQ(planes->BindLower(odd).reason(), "BLOCK_LAYERS");
  EXPECT_EQ(planes->BindLower(std::span(layers).first(1)).reason(), "BLOCK_LAYERS");
  ASSERT_TRUE(planes->BindLower(layers).ok());
  EXPECT_TRUE(planes->Begin({}, nullptr).ok());
}

TEST(BlockPlanesForms, AreThoseOfThePage) {
  const Geometry llama{32, 32, 8, 128, 16, DType::kBF16, {}, 0};
  const auto form = [&](std::string_view plan, const Geometry& g) {
    const BlockPlanesForm made = BlockPlanes::FormOf(ParsePlan(plan).value(), g).value();
    return std::pair(made.token_bytes, made.slot_bytes);
  };
  EXPECT_EQ(form("strata", llama), std::pair(int64_t{268}, int64_t{8} << 20));
  EXPECT_EQ(form("strata{keep = 4}", llama), std::pair(int64_t{140}, int64_t{8} << 20));
  Geometry small = llama;
  small.head_dim = 64;
  EXPECT_EQ(form("strata", small), std::pair(int64_t{136}, int64_t{4} << 20));
  const auto on_host = [](std::string_view plan, const Geometry& g) {
    const BlockPlanesForm made = BlockPlanes::FormOf(ParsePlan(plan).value(), g).value();
    return std::pair(made.token_bytes, made.lower_token_bytes);
  };
  using Bytes = std::pair<int64_t, int64_t>;
  EXPECT_EQ(on_host("strata{lower = 'host', hot = 0}", llama), Bytes(76, 192));
  EXPECT_EQ(on_host("strata{lower = 'host'}", llama), Bytes(102, 192));
  EXPECT_EQ(on_host("strata{lower = 'host', hot = 4, keep = 4}", small), Bytes(44, 32));
}

}  // namespace
}  // namespace kvstrata
