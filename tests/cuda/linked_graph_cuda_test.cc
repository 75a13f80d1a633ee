// SPDX-License-Identifier: Apache-2.0
// Graphs that a caller captures of its layers, on the linked transport (linked_cuda_fixture.h).
#include "tests/cuda/linked_cuda_fixture.h"
#include "tests/e2e/operator.h"

namespace kvstrata::cuda {
namespace {

constexpr char kBits[] = "bits{unit = 32, budget = 64, recent = 48, min_tokens = 0}";

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

// One sequence of a batch gets a row that is not finite, in a step of calls and in one of a graph.
// It goes on; nobody finds its pages from there on. The other one's are found.
TEST_F(LinkedCuda, WhatIsNotFiniteIsNobodysHit) {
  int32_t first = 0;
  for (const char* plan : {"full", kQuest}) {
    for (const bool replayed : {false, true}) {
      for (const char kind : {'k', 'v'}) {
        SCOPED_TRACE(std::string(plan) + (replayed ? ", replayed, " : ", ") + kind);
        LinkedSequence bad, good;
        const auto prompt = Ids(160, first += 10'000), other = Ids(160, first + 5'000);
        Open(plan, prompt, &bad);
        Open(plan, other, &good);
        ASSERT_NO_FATAL_FAILURE(Prefill(&bad, prompt, true));
        ASSERT_NO_FATAL_FAILURE(Prefill(&good, other, true));
        LinkedTensors tensors(2, true);
        ASSERT_NO_FATAL_FAILURE(Step({&bad, &good}, {{1}, {2}}, &tensors));
        kvs_step* step = nullptr;
        ASSERT_NO_FATAL_FAILURE(Begin({&bad, &good}, {{3}, {4}}, &tensors, &step));
        const auto graph = Captured(step, &tensors);
        ASSERT_NO_FATAL_FAILURE(Launch(graph.get(), step, {&bad, &good}, &tensors));
        for (int i = 0; i < 40; ++i) {
          ASSERT_NO_FATAL_FAILURE(Begin({&bad, &good}, {{5 + i}, {6 + i}}, &tensors, &step));
          if (i == 3) {
            const BF16 infinite = FromFloat<BF16>(INFINITY);  // for the first member's row
            void* const at =
                static_cast<BF16*>(const_cast<void*>(tensors.Tensor(kind, 1).data)) + 70;
            Check(cudaMemcpy(at, &infinite, sizeof(infinite), cudaMemcpyHostToDevice), "spoiling");
            Check(cudaStreamSynchronize(nullptr), "spoiling");
          }
          if (replayed) {
            ASSERT_KVS(kvs_step_replay(step));
            graph->Launch();
          } else {
            for (int layer = 0; layer < kLayers; ++layer) Layer(step, layer, &tensors);
          }
          ASSERT_KVS(kvs_step_end(step, stream_));
          Check(cudaStreamSynchronize(stream_), "a step");  // its tensors are the next one's
        }
        ASSERT_KVS(kvs_settle(session_, bad.handle));
        ASSERT_KVS(kvs_settle(session_, good.handle));
        LinkedSequence again;
        uint32_t held = 0;
        Open("full", bad.ids, &again, &held);
        EXPECT_EQ(held, 160u);  // the row is of position 165
        ASSERT_KVS(kvs_sequence_close(session_, again.handle));
        Open("full", good.ids, &again, &held);
        EXPECT_EQ(held, 192u);
        for (const auto& s : {bad, good, again}) {
          ASSERT_KVS(kvs_sequence_close(session_, s.handle));
        }
      }
    }
  }
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
