// SPDX-License-Identifier: Apache-2.0
// Selector bucket (SentenceKV) in CudaSteps: sentences end beside the graph.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// SentenceKV: one graph serves steps over the ends of sentences, whoever has which place; steps
// that are given up, other shapes and another workspace in between. One prompt is short, and
// attended in full until it has grown.
TEST(CudaStep, SentencesEndBesideTheGraph) {
  Twins twins(Small(), {kSentences, kSentences, kLongSentences, kSentences});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260, 311, 224, 120}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  CudaWorkspace other(*kvs_cuda_ops(), twins.geometry);
  Replays replays(twins);
  for (int i = 0; i < 90; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    if (i % 5 == 1) {
      ASSERT_NO_FATAL_FAILURE(twins.GiveUp(twins.Each(1)));
    }
    if (i % 7 == 3) std::swap(twins.sequences[0], twins.sequences[1]);
    if (i % 13 == 5) twins.sequences[1]->Clone();
    if (i % 17 == 8) {
      twins.used = &other;
      ASSERT_NO_FATAL_FAILURE(twins.Run({1, 21, 2, 1}));
      twins.used = &twins.workspace;
    }
  }
  EXPECT_EQ(replays.captures, 1);
  EXPECT_GT(twins.bucket_selections, 300);
  EXPECT_LE(twins.kept_ties * 2, twins.bucket_selections);
  twins.ExpectFewTies();
}

// Parent and child go on from the same buckets and the same sentence.
TEST(CudaStep, AForkInheritsItsSentences) {
  Twins twins(Small(), {kSentences});
  ASSERT_NO_FATAL_FAILURE(twins.Run({100}));
  twins.Fork(0);  // in the middle of a prompt
  ASSERT_NO_FATAL_FAILURE(twins.Run({140, 170}));
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 8; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  twins.Fork(0);
  twins.Fork(2);  // the child has not stepped
  for (int i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  EXPECT_GT(twins.bucket_selections, 200);
  EXPECT_LE(twins.kept_ties * 2, twins.bucket_selections);
  twins.ExpectFewTies();
}

// A prompt whose boundaries or last queries are missing is attended in full; boundaries that come
// later count from then on.
TEST(CudaStep, SentencesThatAreNotReported) {
  Twins twins(Small(), {kSentences, kSentences});
  twins.boundary_every = 0;
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {240, 280}));
  for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 0);
  twins.boundary_every = 12;
  ASSERT_NO_FATAL_FAILURE(twins.ReportBoundaries());
  for (int i = 0; i < 30; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 120);
  // As of a prefix that is held: no query of it was seen.
  for (const auto& s : twins.sequences) s->Hold(twins.geometry, s->on_host->tokens());
  for (const auto& s : twins.sequences) s->bounded = 0;
  ASSERT_NO_FATAL_FAILURE(twins.ReportBoundaries());
  ASSERT_NO_FATAL_FAILURE(twins.Run({15, 25}));  // 20 queries judge
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  twins.bucket_selections = 0;
  for (int i = 0; i < 30; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 60);
  twins.ExpectFewTies();
}

// More kept tokens and sentences than one round of a CTA takes.
TEST(CudaStep, SentencesOfALongPrompt) {
  Twins twins(OneLayer(), {"sentencekv", "sentencekv{pool = 1, max_length = 40}"}, 9000);
  for (const auto& s : twins.sequences) {
    s->pages.Draw(twins.rng, twins.geometry.dtype, 1.0f);
    s->Hold(twins.geometry, 8000 + Below(twins.rng, 700));
    s->bounded = 0;
  }
  twins.boundary_every = 27;
  ASSERT_NO_FATAL_FAILURE(twins.Run({32, 45}));
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 40);
}

}  // namespace
}  // namespace kvstrata::cuda
