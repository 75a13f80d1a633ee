// SPDX-License-Identifier: Apache-2.0
// Selector cascade (CHESS) in CudaSteps: selections beside the graph.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// One graph serves steps that select anew and steps that do not, whoever has which place: sequences
// change places, a clone goes on for its original, and another workspace has a turn.
TEST(CudaStep, CascadesSelectBesideTheGraph) {
  Twins twins(Small(), {kChessEntropy, kChessEntropy, kChess});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {160, 311, 224}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  CudaWorkspace other(*kvs_cuda_ops(), twins.geometry);
  Replays replays(twins);
  for (int i = 0; i < 90; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    ASSERT_NO_FATAL_FAILURE(twins.ReportEntropies());
    if (i % 7 == 3) std::swap(twins.sequences[0], twins.sequences[1]);
    if (i % 11 == 5) twins.sequences[0]->Clone();
    if (i % 13 == 8) {
      twins.used = &other;
      ASSERT_NO_FATAL_FAILURE(twins.Run({1, 21, 2}));
      twins.used = &twins.workspace;
    }
  }
  EXPECT_EQ(replays.captures, 1);
  for (const auto& s : twins.sequences) {
    const auto made = TwinSequence::Inspected<int32_t>(*s->on_host, s->HostView(), "selections");
    EXPECT_GT(made[0], 3);
    EXPECT_EQ(TwinSequence::Inspected<int32_t>(*s->on_device, s->HostView(), "selections"), made);
  }
  twins.ExpectFewTies();
}

// Levels of more units than a CTA has threads; random keys, and keys that all score the same.
TEST(CudaStep, CascadesOfLongSequences) {
  for (const char* shape :
       {"page = 16", "page = 16, pages_per_chunk = 1, chunks_per_grid = 1, rho = [0.9, 0.8, 0.7]",
        "page = 32, pages_per_chunk = 3, chunks_per_grid = 5, rho = [1.0, 0.4, 0.3]"}) {
    for (const float scale : {1.0f, 0.0f}) {
      SCOPED_TRACE(std::string(shape) + (scale == 0 ? ", equal scores" : ""));
      const std::string plan = "chess{" + std::string(shape) + "}";
      Twins twins(Small(), {plan, plan}, 41000);
      for (const auto& s : twins.sequences) {
        s->pages.Draw(twins.rng, twins.geometry.dtype, scale);
        s->Hold(twins.geometry, 33000 + Below(twins.rng, 7000));
      }
      ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
      for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
      if (scale == 0) {
        EXPECT_EQ(twins.unequal, 0);
      }
      twins.ExpectFewTies();
    }
  }
}

}  // namespace
}  // namespace kvstrata::cuda
