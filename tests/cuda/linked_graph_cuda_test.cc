// SPDX-License-Identifier: Apache-2.0
// Graphs that a caller captures of its layers, on the linked transport (linked_cuda_fixture.h).
#include "tests/cuda/linked_cuda_fixture.h"
#include "tests/e2e/operator.h"

namespace kvstrata::cuda {
namespace {

constexpr char kBits[] = "strata{unit = 32, budget = 64, recent = 48, min_tokens = 0}";

class LinkedCudaGraph : public LinkedCuda, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Plans, LinkedCudaGraph,
                         ::testing::Values(kQuest, kChess, kMosaic, kSentences, kBits));

TEST_P(LinkedCudaGraph, OfTheCallersServesLaterSteps) {
  LinkedSequence a, b;
  Open(GetParam(), Ids(300), &a);
  Open(GetParam(), Ids(150, 5000), &b);
  ASSERT_NO_FATAL_FAILURE(Prefill(&a, Ids(300), true));
  ASSERT_NO_FATAL_FAILURE(Prefill(&b, Ids(150, 5000), true));
  ASSERT_NO_FATAL_FAILURE(Report(a));
  ASSERT_NO_FATAL_FAILURE(Report(b));
  LinkedTensors tensors(2, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a, &b}, {{7}, {8}}, &tensors));  // buffers get their size
  kvs_step* step = nullptr;
  ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{9}, {10}}, &tensors, &step));
  const auto graph = Captured(step, &tensors);
  ASSERT_NO_FATAL_FAILURE(Launch(graph.get(), step, {&a, &b}, &tensors));
  for (int i = 0; i < 40; ++i) {  // over the ends of pages and of index units
    ASSERT_NO_FATAL_FAILURE(Replay(graph.get(), {&a, &b}, {{100 + i}, {200 + i}}, &tensors))
        << "replay " << i;
  }
  ASSERT_NO_FATAL_FAILURE(Begin({&a}, {{1}}, &tensors, &step));
  EXPECT_REFUSED(kvs_step_replay(step), "GRAPH_STALE");
  kvs_step_abort(step);
  a.ids.pop_back();
  LinkedTensors one(1, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a}, {{2}}, &one));  // nothing of the aborted step is left
}

// Slices of demoted pages are promoted by a graph that is captured when its predecessor is stale;
// it goes on when the pages come back.
TEST_F(LinkedCuda, AGraphPromotesWhatItSelects) {
  testing::Operator admin(daemon_.socket());
  LinkedSequence s;
  Open(kQuest, Ids(600), &s);
  ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
  LinkedTensors tensors(1, true);
  std::unique_ptr<CapturedGraph> graph;
  kvs_step* step = nullptr;
  const auto decode = [&](int steps, const char* refused) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(Begin({&s}, {{100 + i}}, &tensors, &step));
      if (i > 0 || refused == nullptr) {
        ASSERT_KVS(kvs_step_replay(step));
      } else {
        EXPECT_REFUSED(kvs_step_replay(step), refused);
        graph = Captured(step, &tensors);
      }
      ASSERT_NO_FATAL_FAILURE(Launch(graph.get(), step, {&s}, &tensors)) << "step " << i;
    }
  };
  ASSERT_NO_FATAL_FAILURE(decode(3, "GRAPH_STALE"));
  for (int round = 0; round < 3; ++round) {
    EXPECT_GT(admin.Demote(s.handle).pages(), 0u);
    ASSERT_NO_FATAL_FAILURE(decode(30, round == 0 ? "GRAPH_STALE" : nullptr));
    EXPECT_GT(admin.Prefetch(s.handle).pages(), 0u);
    ASSERT_NO_FATAL_FAILURE(decode(3, nullptr));
  }
  EXPECT_EQ(admin.Audit(), "");
}

// TokenSelect: a graph of the caller's, whose steps the GPU finds to be hits or misses; a fork goes
// on with the cache.
TEST_F(LinkedCuda, AGraphServesHitsAndMissesOfTheSelectionCache) {
  LinkedSequence a, b;
  Open(kTokens, Ids(400), &a);
  ASSERT_NO_FATAL_FAILURE(Prefill(&a, Ids(400), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&a, 3, true));
  b = a;
  ASSERT_KVS(kvs_sequence_fork(session_, a.handle, &b.handle));
  LinkedTensors tensors(2, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a, &b}, {{7}, {8}}, &tensors));
  kvs_step* step = nullptr;
  ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{9}, {10}}, &tensors, &step));
  const auto graph = Captured(step, &tensors);
  ASSERT_NO_FATAL_FAILURE(Launch(graph.get(), step, {&a, &b}, &tensors));
  lists_.clear();
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(Replay(graph.get(), {&a, &b}, {{100 + i}, {200 + i}}, &tensors))
        << "replay " << i;
  }
  // The picked tokens stay on a hit, and change on a miss.
  int hits = 0, misses = 0;
  for (size_t i = 2; i < lists_.size(); ++i) {
    const bool same = std::equal(lists_[i].begin(), lists_[i].begin() + 68, lists_[i - 2].begin());
    ++(same ? hits : misses);
  }
  EXPECT_GT(hits, 8);
  EXPECT_GT(misses, 8);
}

}  // namespace
}  // namespace kvstrata::cuda
