// SPDX-License-Identifier: Apache-2.0
// CudaSteps over pages in the host's memory: attended in place, or promoted.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

constexpr const char* kPromoting[] = {
    kQuest,
    "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", budget = 64, min_tokens = 0}",
    kTokens,
    kSentences,
    kChess,
    kChessAlways,
    kWindow,
    "quest{budget = 32, page = 32, min_tokens = 0}",
    "full",
    kBits};

// Pages come and go between memories; selections drift, slices are promoted and evicted.
TEST(CudaStep, PagesOfTheHostAreAttendedInPlaceOrPromoted) {
  for (const auto& [dtype, page] : {std::pair{DType::kBF16, 16}, {DType::kF16, 32}}) {
    for (const char* plan : kPromoting) {
      SCOPED_TRACE(std::string(plan) + " page " + std::to_string(page));
      Twins twins(Small(dtype, page), {plan, plan, plan});
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, {333, 170, 260}));
      for (int i = 0; i < 40; ++i) {
        if (i % 8 == 2) twins.MovePages(i == 2 ? 1 : 3);
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
        if (i % 8 != 6) continue;
        ASSERT_NO_FATAL_FAILURE(twins.Run({1, 3, 1}, {.dtype = dtype}));
      }
      twins.ExpectFewTies();
    }
  }
}

// The same query again reads nothing of the host's memory.
TEST(CudaStep, SelectedSlicesStayOnTheGpu) {
  for (const char* plan :
       {"quest{budget = 64, min_tokens = 0}", kQuestSoftmax, kTokens,
        "sentencekv{tau = 48, n_obs = 20, start = 5, recent = 12, min_tokens = 0}", kWindow,
        kFourBits}) {
    SCOPED_TRACE(plan);
    Twins twins(Small(), {plan});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {300}));
    twins.boundary_every = 0;  // buckets stay
    TwinSequence& s = *twins.sequences[0];
    const int32_t moved = s.CompletePages(twins.geometry);
    std::vector<Tensors> tensors = twins.NewTensors(1, {});
    for (int i = 0; i < 4; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.RunWith({1}, tensors, Tier::kDevice));
      Check(cudaDeviceSynchronize(), "a step");
      for (int32_t p = 0; p < moved && i < 2; ++p) {
        const auto page = static_cast<size_t>(p);
        if (i == 0) s.MovePage(twins.geometry, page, true);
        if (i == 1) {
          std::memset(s.pages.device_pieces[page], 0xFF,
                      static_cast<size_t>(twins.geometry.page_bytes()));
        }
      }
    }
  }
}

// A graph of steps that promote serves those that need not; of steps that do not it is stale where
// pages are the host's.
TEST(CudaStep, CapturedLayersPromote) {
  Twins twins(Small(), {kQuest, kTokens, kSentences, kQuestSoftmax, kBits}, 2 * kCapacity);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {140, 200, 333, 160, 240}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  const auto replay = [&twins](Replays& replays, int steps) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(replays.Step());
      if (i % 6 == 3) twins.MovePages(4);
    }
  };
  Replays before(twins);
  ASSERT_NO_FATAL_FAILURE(before.Step());
  twins.MovePages(1);
  Replays replays(twins);
  ASSERT_NO_FATAL_FAILURE(replay(replays, 40));
  EXPECT_EQ(replays.captures, 1);
  EXPECT_EQ(replays.refused, 1);
  for (const auto& s : twins.sequences) {
    for (size_t i = 0; i < s->host_pages.size(); ++i) s->MovePage(twins.geometry, i, false);
    EXPECT_TRUE(s->host_pages.empty());
  }
  ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 1);
  ASSERT_NO_FATAL_FAILURE(replay(replays, 30));
  // Tables that have to grow.
  const int captures = replays.captures;
  ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1, 900, 1}));
  ASSERT_NO_FATAL_FAILURE(replay(replays, 20));
  EXPECT_EQ(replays.captures, captures + 1);
  twins.ExpectFewTies();
}

// Many more pages than slots: what is promoted is evicted and promoted again.
TEST(CudaStep, PromotedSlicesAreEvicted) {
  Twins twins(Small(), {"quest{budget = 32, min_tokens = 0}",
                        "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", budget = "
                        "16, min_tokens = 0}"});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {900, 800}));
  twins.MovePages(1);
  for (int i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

TEST(CudaStep, AForkBeginsWithoutPromotedSlices) {
  for (const char* plan : {kQuest, kBits}) {
    Twins twins(Small(), {plan});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260}));
    twins.MovePages(2);
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1}));
    twins.Fork(0);
    twins.MovePages(2);
    for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    twins.ExpectFewTies();
  }
}

}  // namespace
}  // namespace kvstrata::cuda
