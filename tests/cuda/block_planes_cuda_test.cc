// SPDX-License-Identifier: Apache-2.0
// Plan strata over an engine's own blocks on a GPU, launch by launch and in graphs that serve
// smaller steps: as tests/kernels/block_planes_test.cc, whose engine it is.
#include <cstdio>

#include "kernels/blocks/block_planes.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/kernels/planes_exercise.h"

namespace kvstrata {
namespace {

struct Case {
  const char* plan;
  int32_t query_heads, kv_heads, head_dim;
};

class BlockPlanesCudaTest : public ::testing::TestWithParam<Case> {
 protected:
  PlanesEngineOptions Options(bool graphs) {
    const Case& c = GetParam();
    PlanesEngineOptions o{.plan = c.plan, .layers = 3, .query_heads = c.query_heads};
    o.kv_heads = c.kv_heads;
    o.head_dim = c.head_dim;
    o.dtype = random_.Below(2) == 0 ? DType::kBF16 : DType::kF16;
    o.apart = random_.Below(2) == 0;
    o.graphs = graphs;
    o.limit = 2e-2;
    return o;
  }
  void ExpectFewTies(const PlanesEngine& engine, double worst) {
    const PlanesOracle& oracle = engine.oracle();
    std::printf("error %.2g, %d heads compared, %d near-ties\n", worst, oracle.compared(),
                oracle.near_ties());
    EXPECT_LT(worst, 2e-2);
    EXPECT_GT(oracle.compared(), 5 * oracle.near_ties());
  }
  Random random_;
};

constexpr Case kCases[] = {
    {"strata{min_tokens = 0, fine_above = 7, recent = 32}", 8, 2, 128},
    {"strata{min_tokens = 150, fine_above = 7, recent = 20, sample = 2, keep = 4}", 4, 4, 64},
    {"strata{n_dense_layers = 1, min_tokens = 0, fine_above = 7, recent = 1, sinks = 0}", 8, 1,
     128},
    {"strata", 6, 2, 64},
    {"strata{min_tokens = 0, fine_above = 7, recent = 32, lower = 'host'}", 8, 2, 128},
    {"strata{min_tokens = 150, fine_above = 7, recent = 20, keep = 4, lower = 'host'}", 4, 4, 64},
};
INSTANTIATE_TEST_SUITE_P(Plans, BlockPlanesCudaTest, ::testing::ValuesIn(kCases));

TEST_P(BlockPlanesCudaTest, StepsAttendAndSealWhatTheyShould) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(*kvs_cuda_ops(), &random_, Options(false));
  ExpectFewTies(engine, ExercisePlanes(&engine, &random_, 40));
}

TEST_P(BlockPlanesCudaTest, GroupsFillWhileDecoding) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(*kvs_cuda_ops(), &random_, Options(false));
  ExpectFewTies(engine, DecodePlanes(&engine, 100));
}

TEST_P(BlockPlanesCudaTest, GraphsServeLaterSteps) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(*kvs_cuda_ops(), &random_, Options(true));
  ExpectFewTies(engine, DecodePlanes(&engine, 100));
}

TEST_P(BlockPlanesCudaTest, GraphsServeMixedSteps) {
  SCOPED_TRACE(random_.Trace());
  PlanesEngine engine(*kvs_cuda_ops(), &random_, Options(true));
  ExpectFewTies(engine, ExercisePlanes(&engine, &random_, 40));
}

}  // namespace
}  // namespace kvstrata
