// SPDX-License-Identifier: Apache-2.0
// Selector vote (TokenSelect) in CudaSteps: the selection cache, hits and misses.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

TEST(CudaStep, OneGraphServesHitsAndMisses) {
  // The third is shorter than min_tokens and grows beyond it.
  Twins twins(OneLayer(), {kTokens, kTokens, kTokens, "full", kTokens});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 333, 130, 160, 250}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 60; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    // Eager steps, chunks and steps that are given up in between.
    if (i % 10 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    ASSERT_NO_FATAL_FAILURE(twins.GiveUp(twins.Each(1)));
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 3, 1, 1, 9}));
  }
  EXPECT_EQ(replays.captures, 1);
  EXPECT_GT(twins.hits, 50);
  EXPECT_GT(twins.misses, 50);
  twins.ExpectFewTies();
}

TEST(CudaStep, OptionsOfTokenSelect) {
  constexpr const char* kRest = ", k = 48, n_local = 20, chunk = 64, min_tokens = 0}";
  for (const auto& [options, hits, misses] :
       {std::tuple{"theta = 1, n_init = 4", false, true},
        {"theta = -1, n_init = 0, append_departed = true", true, true},
        {"theta = 0, n_init = 7, append_departed = true, n_dense_layers = 1", true, true},
        {"theta = -0.15, n_init = 16, cosine = \"head\"", true, true}}) {
    SCOPED_TRACE(options);
    Twins twins(Small(), {std::string("tokenselect{") + options + kRest});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {330}));
    for (int i = 0; i < 40; ++i) {
      const DType dtype = i % 2 == 0 ? DType::kF32 : DType::kBF16;
      ASSERT_NO_FATAL_FAILURE(twins.Run({i % 9 == 4 ? 5 : 1}, {.dtype = dtype}));
    }
    EXPECT_EQ(twins.hits > 0, hits);
    EXPECT_EQ(twins.misses > 0, misses);
    twins.ExpectFewTies();
  }
}

// Parent and child go on from the same cached selections, and no longer share them.
TEST(CudaStep, AForkInheritsTheSelectionCache) {
  Twins twins(Small(), {kTokens});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260}));
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1}));
  twins.Fork(0);
  twins.Fork(1);  // the child has not stepped
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  twins.Fork(2);
  twins.sequences.erase(twins.sequences.begin() + 2);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  EXPECT_GT(twins.hits, 40);
  twins.ExpectFewTies();
}

}  // namespace
}  // namespace kvstrata::cuda
