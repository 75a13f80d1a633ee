// SPDX-License-Identifier: Apache-2.0
// Plan strata in CudaSteps: groups that are sealed while sequences grow, with rows that are not.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// Raw rows of what is sealed are NaN on the GPU, so that nothing but groups can be read.
TEST(CudaStepPlanes, FollowTheCpuStep) {
  for (const char* plan : {kPlanes, kFourBitPlanes, kFinePlanes, kHostPlanes, kFewHotPlanes,
                           kColdPlanes, kSharePlanes, kHostSharePlanes}) {
    for (const auto& [dtype, page, batch] :
         {std::tuple{DType::kBF16, 16, 1}, {DType::kF16, 32, 5}, {DType::kBF16, 64, 3}}) {
      SCOPED_TRACE(std::string(plan) + " batch " + std::to_string(batch));
      Twins twins(Small(dtype, page), std::vector<std::string>(static_cast<size_t>(batch), plan));
      std::vector<int32_t> lengths;
      for (int i = 0; i < batch; ++i) lengths.push_back(130 + Below(twins.rng, 200));
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));  // nothing is sealed
      for (int i = 0; i < 70; ++i) {                                        // a group fills
        ASSERT_NO_FATAL_FAILURE(twins.Pack());
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      EXPECT_GE(twins.sequences[0]->extents->end(), 192);
      std::vector<int32_t> n = twins.Each(1);
      n[0] = 19;
      ASSERT_NO_FATAL_FAILURE(twins.Run(n, {.dtype = dtype}));
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = DType::kF32, .gap = 16}));
      twins.ExpectFewTies();
    }
  }
}

TEST(CudaStepPlanes, OfOtherModels) {
  for (const auto& [query_heads, kv_heads, head_dim] :
       {std::tuple{12, 3, 128}, {8, 1, 128}, {3, 3, 64}, {8, 1, 256}}) {
    SCOPED_TRACE(std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " x " +
                 std::to_string(head_dim));
    Geometry g = OneLayer();
    g.query_heads = query_heads;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    Twins twins(g, {"full", kPlanes, kFinePlanes, kFourBitPlanes, kHostPlanes, kSharePlanes});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {160, 330, 200, 257, 300, 290}));
    for (int i = 0; i < 8; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    }
    twins.ExpectFewTies();
  }
}

// More groups than one extent joins, prompts that go on beside, sequences shorter than min_tokens.
TEST(CudaStepPlanes, MembersOfDifferentPlansAndStages) {
  Twins twins(Small(), {kPlanes, kQuest, kPlanes, kFinePlanes, kPlanes, kFourBitPlanes});
  ASSERT_NO_FATAL_FAILURE(twins.Run({140, 200, 700, 190, 128, 581}));
  for (const size_t i : {0, 1, 2, 3, 5}) {
    ASSERT_NO_FATAL_FAILURE(twins.sequences[i]->ClosePrompt(RefBackend()));
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1, i % 5 == 3 ? 4 : 1, i % 4 == 0 ? 25 : 1, 1}));
    for (const size_t s : {0, 2, 3, 5}) {
      ASSERT_NO_FATAL_FAILURE(twins.sequences[s]->Recompress(twins.geometry));
    }
  }
  EXPECT_GE(twins.sequences[2]->extents->end(), 704);
  twins.ExpectFewTies();
}

// One graph, from before anything is sealed until groups have filled and extents have joined.
TEST(CudaStepPlanes, AGraphStaysGoodWhileGroupsFill) {
  Twins twins(OneLayer(),
              {kPlanes, kPlanes, kFinePlanes, kFourBitPlanes, kHostPlanes, kSharePlanes});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 460, 304, 130, 420, 250}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 70; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    if (i % 20 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 3, 1, 1, 1}));
  }
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

// A batch of which some are on their upper planes alone.
const std::vector<std::string> kArriving = {kUpperPlanes, kPlanes, kUpperFourBitPlanes,
                                            kUpperHostPlanes, kUpperPlanes};

void SetArriving(Twins& twins, bool arriving) {
  Check(cudaDeviceSynchronize(), "the steps before");
  for (const auto& s : twins.sequences) {
    if (s->plan.planes.open_on_upper) s->SetArriving(twins.geometry, arriving);
  }
}

// What is on its way is nowhere on the GPU; the host reads what stands for it.
TEST(CudaStepPlanes, OthersStandForLowerRunsUntilTheyAreHere) {
  for (const auto& [dtype, page] : {std::pair{DType::kBF16, 16}, {DType::kF16, 64}}) {
    Twins twins(Small(dtype, page), kArriving);
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {300, 350, 260, 270, 140}));
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    for (const bool arriving : {true, false}) {
      SetArriving(twins, arriving);
      for (int i = 0; i < 5; ++i) {
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      ASSERT_NO_FATAL_FAILURE(twins.Run({3, 1, 1, 2, 9}, {.dtype = dtype}));
    }
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
    twins.ExpectFewTies();
  }
}

// One graph, before they are here and afterwards.
TEST(CudaStepPlanes, AGraphStaysGoodWhenLowerRunsAreHere) {
  Twins twins(OneLayer(), kArriving);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {300, 350, 260, 270, 190}));
  ASSERT_NO_FATAL_FAILURE(twins.Pack());
  SetArriving(twins, true);
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 20; ++i) {
    if (i == 8) SetArriving(twins, false);
    ASSERT_NO_FATAL_FAILURE(replays.Step());
  }
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

// The end of a prompt whose rows are in groups alone, of which some are on their upper planes.
TEST(CudaStepPlanes, APromptGoesOnWithoutItsRawRows) {
  Twins twins(Small(), kArriving);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {300, 350, 260, 270, 140}));
  ASSERT_NO_FATAL_FAILURE(twins.Pack());
  Check(cudaDeviceSynchronize(), "the steps before");
  for (const auto& s : twins.sequences) s->Reopen(twins.geometry);
  for (const bool arriving : {true, false}) {
    SetArriving(twins, arriving);
    ASSERT_NO_FATAL_FAILURE(twins.Run({3, 17, 1, 1, 9}));
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  }
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  twins.ExpectFewTies();
}

// Tokens of the group that fills are taken back, and others come.
TEST(CudaStepPlanes, GoesOnAfterATruncateInsideAGroup) {
  Twins twins(Small(), {kPlanes, kFinePlanes, kHostPlanes});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 260, 230}));
  for (const int32_t taken : {3, 17, 1}) {
    for (int i = 0; i < 20; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    }
    for (const auto& s : twins.sequences) {
      const int32_t left = std::max(s->on_host->tokens() - taken, s->extents->end());
      s->on_host->Truncate(left);
      s->on_device->Truncate(left);
    }
  }
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  }
  twins.ExpectFewTies();
}

TEST(CudaStepPlanes, RefusesDamagedExtents) {
  Twins twins(Small(), {kPlanes});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  ASSERT_NO_FATAL_FAILURE(twins.Pack());
  TwinSequence& s = *twins.sequences[0];
  const auto begin = [&]() -> Status {
    const SequenceView view = s.DeviceView();
    KVS_RETURN_IF_ERROR(s.on_device->Refresh(view));
    return CudaStep::Begin({{s.on_device.get(), view, 1}}, &twins.workspace, twins.stream.get(), {})
        .status();
  };
  // The magic, where lower runs begin, and bits of a code that are possible but not the plan's.
  for (const auto& [at, bit] : {std::pair{0, 1}, {80 + 7, 64}, {68, 8 ^ 4}}) {
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
    EXPECT_EQ(begin().reason(), "EXTENT_INVALID") << at;
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
  }
  const Status sound = begin();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

}  // namespace
}  // namespace kvstrata::cuda
