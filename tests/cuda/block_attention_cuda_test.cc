// SPDX-License-Identifier: Apache-2.0
// Attention over an engine's own blocks on a GPU, launch by launch and in graphs that serve steps
// of fewer rows: as tests/kernels/block_attention_test.cc, whose engine it is.
#include "kernels/blocks/block_attention.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/kernels/block_exercise.h"

namespace kvstrata {
namespace {

struct Case {
  const char* plan;
  int32_t block_tokens, query_heads, kv_heads, head_dim;
};

class BlockAttentionCudaTest : public ::testing::TestWithParam<Case> {
 protected:
  BlockEngineOptions Options() {
    const Case& c = GetParam();
    BlockEngineOptions o{.plan = c.plan, .block_tokens = c.block_tokens, .layers = 3};
    o.query_heads = c.query_heads;
    o.kv_heads = c.kv_heads;
    o.head_dim = c.head_dim;
    o.slots_first = random_.Below(2) == 0;
    o.apart = random_.Below(2) == 0;
    o.tie = 2e-2f;  // what ops score and vote may be off by, with room
    return o;
  }
  Random random_;
};

constexpr Case kCases[] = {
    {"full", 16, 8, 2, 128},
    {"window{n_sink = 4, n_recent = 40, min_tokens = 0}", 32, 4, 4, 64},
    {"quest{budget = 64, min_tokens = 0}", 16, 8, 2, 128},
    {"quest{budget = 64, min_tokens = 150}", 128, 8, 1, 64},
    {"quest{budget = 32, n_sink = 8, n_recent = 8, min_tokens = 0}", 16, 2, 2, 256},
    {"quest{budget = 64, group = \"softmax\", n_dense_layers = 1, min_tokens = 0}", 64, 6, 2, 128},
    {"bits{budget = 40, min_tokens = 0}", 64, 8, 2, 128},
    {"bits{budget = 24, unit = 32, recent = 32, bits = 3, min_tokens = 0}", 128, 4, 2, 64},
    {"quest{budget = 64, score = \"deviation\", min_tokens = 0}", 32, 8, 2, 128},
    {"bits{budget = 40, run = 8, min_tokens = 0}", 64, 8, 2, 128},
    {"tokenselect{k = 30, n_init = 8, n_local = 16, min_tokens = 0}", 32, 4, 2, 128},
};
INSTANTIATE_TEST_SUITE_P(Plans, BlockAttentionCudaTest, ::testing::ValuesIn(kCases));

TEST_P(BlockAttentionCudaTest, StepsAttendWhatThePlanSays) {
  SCOPED_TRACE(random_.Trace());
  BlockEngine engine(*kvs_cuda_ops(), &random_, Options());
  EXPECT_LT(Exercise(&engine, &random_, 40), 2e-2);
  EXPECT_GT(engine.oracle().compared(), 0);
}

TEST_P(BlockAttentionCudaTest, GraphsServeLaterSteps) {
  SCOPED_TRACE(random_.Trace());
  BlockEngineOptions options = Options();
  options.graphs = true;
  BlockEngine engine(*kvs_cuda_ops(), &random_, options);
  EXPECT_LT(Exercise(&engine, &random_, 40), 2e-2);
  EXPECT_GT(engine.oracle().compared(), 0);
}

}  // namespace
}  // namespace kvstrata
