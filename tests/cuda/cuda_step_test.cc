// SPDX-License-Identifier: Apache-2.0
// CudaStep against Step with backend `ref`, side by side on random tokens: every selector over raw
// rows, tensors of the device and of the host; what it refuses; when it leaves the epoch. Graphs
// and the families of plans have files of their own (cuda_step_*_test.cc).
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_twins.h"

namespace kvstrata::cuda {
namespace {

TEST(CudaStep, FollowsTheCpuStep) {
  for (const char* plan : kPlans) {
    for (const auto& [dtype, page, batch] :
         {std::tuple{DType::kBF16, 16, 1}, {DType::kBF16, 32, 5}, {DType::kF16, 16, 8}}) {
      SCOPED_TRACE(std::string(plan) + " batch " + std::to_string(batch));
      Twins twins(Small(dtype, page), std::vector<std::string>(static_cast<size_t>(batch), plan));
      std::vector<int32_t> lengths;
      for (int i = 0; i < batch; ++i) lengths.push_back(130 + Below(twins.rng, 200));
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
      for (int i = 0; i < 42; ++i) {
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      // A chunk behind the prompt: the selection of its first token.
      std::vector<int32_t> n = twins.Each(1);
      n[0] = 19;
      ASSERT_NO_FATAL_FAILURE(twins.Run(n, {.dtype = dtype}));
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      twins.ExpectFewTies();
    }
  }
}

TEST(CudaStep, OtherShapesOfModels) {
  for (const auto& [query_heads, kv_heads, head_dim] :
       {std::tuple{32, 8, 128}, {8, 1, 128}, {4, 4, 64}, {8, 2, 256}}) {
    SCOPED_TRACE(std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " x " +
                 std::to_string(head_dim));
    Geometry g = Small();
    g.query_heads = query_heads;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    Twins twins(g, {kQuest, kQuestSoftmax, kChess, kTokens, kSentences, kBits, kFourBits});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 260, 230, 300, 310, 280, 190}));
    for (int i = 0; i < 4; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  }
}

TEST(CudaStep, MembersOfDifferentPlansAndStages) {
  Twins twins(Small(), {"full", kQuestSoftmax, kTokens, kQuest, kWindow, kTokens, kQuestSoftmax,
                        kChess, kChessAlways, kSentences, kSentences, kLongSentences, kSentences,
                        kBits, kThreeBits, kMissed});
  ASSERT_NO_FATAL_FAILURE(
      twins.Run({200, 180, 300, 170, 151, 90, 180, 190, 260, 220, 160, 199, 110, 210, 250, 140}));
  // Two prompts go on while the others decode.
  for (const size_t i : {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15}) {
    ASSERT_NO_FATAL_FAILURE(twins.sequences[i]->ClosePrompt(RefBackend()));
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(
        twins.Run({1, 1, 1, i % 7 == 3 ? 4 : 1, 1, i % 3 == 0 ? 17 : 1, 1, 1, 1, 1,
                   i % 5 == 2 ? 3 : 1, 1, i % 4 == 0 ? 25 : 1, 1, 1, i % 6 == 1 ? 5 : 1}));
  }
  twins.ExpectFewTies();
}

TEST(CudaStep, SummarizesAPrefixThatIsHeldWithoutIndex) {
  Twins twins(Small(), {kQuestSoftmax, kQuest, kChess, kBits});
  ASSERT_NO_FATAL_FAILURE(twins.Run({333, 280, 299, 310}));
  for (const auto& s : twins.sequences) s->ForgetIndex(twins.geometry);
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
}

TEST(CudaStep, TensorsOfTheHostAndOfAnyStride) {
  Twins twins(Small(), {kQuestSoftmax, kQuest, kTokens, kBits});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 210, 220, 230}));
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t gap : {0, 4, 16}) {
        SCOPED_TRACE(std::to_string(gap) + " bytes between rows");
        ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1, 1}, {dtype, tier, gap}));
        ASSERT_NO_FATAL_FAILURE(twins.Run({3, 1, 2, 1}, {dtype, tier, gap}));
      }
    }
  }
  twins.ExpectFewTies();
}

// Small enough for racecheck (bench/cuda/run_gpu.sh): what only whole steps call, too.
TEST(CudaStep, AFewStepsOfEverySelector) {
  Twins twins(OneLayer(), {kTokens, kChess, kSentences, kBits});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {190, 170, 180, 190}));
  for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
}

TEST(CudaStep, RefusesPlansThatItDoesNotServe) {
  Twins twins(Small(), {"full", "mosaickv{strategy = \"search\"}"});
  const auto step =
      CudaStep::Begin(twins.DeviceMembers({1, 1}), &twins.workspace, twins.stream.get(), {});
  EXPECT_EQ(step.status().code(), Code::kUnimplemented);
  EXPECT_EQ(step.status().reason(), "CUDA_PLAN");
  for (const char* option : {"keep_rest", "per_query_head"}) {
    const Plan plan = ParsePlan("sentencekv{" + std::string(option) + " = true}").value();
    const Status refused = CudaServes(plan, Small());
    EXPECT_EQ(refused.reason(), "CUDA_PLAN");
    EXPECT_NE(refused.message().find(option), std::string::npos) << refused.message();
  }
  EXPECT_TRUE(CudaServes(ParsePlan("sentencekv").value(), Small()).ok());
}

// The reader's slot is written when the step has ended or was given up, behind all of its work.
TEST(CudaStep, LeavesTheEpochWhenTheGpuIsDone) {
  Twins twins(Small(), {kQuestSoftmax});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  alignas(4096) static uint64_t slots[512];
  Check(kvs_cuda_ops()->register_host(slots, sizeof(slots), false), "registering");
  std::atomic_ref<uint64_t> slot(slots[3]);
  std::vector<Tensors> tensors = twins.NewTensors(1, {});
  const auto wait = [&] { Check(cudaStreamSynchronize(twins.stream.get()), "the stream"); };

  slot = 17;
  auto step = twins.Begin({1}, {&slots[3], 0});
  for (int layer = 0; layer < 2; ++layer) {
    Twins::Enqueue(*step, layer, tensors[static_cast<size_t>(layer)], Tier::kDevice);
  }
  wait();
  EXPECT_EQ(slot.load(), 17u);
  ASSERT_TRUE(step->End(twins.stream.get()).ok());
  wait();
  EXPECT_EQ(slot.load(), 0u);
  step.reset();

  slot = 18;
  const int32_t tokens = twins.sequences[0]->on_device->tokens();
  step = twins.Begin({1}, {&slots[3], 5});
  step.reset();
  wait();
  EXPECT_EQ(slot.load(), 5u);
  EXPECT_EQ(twins.sequences[0]->on_device->tokens(), tokens);

  // Given up while a graph is captured: the graph has not run, and must not write the slot.
  slot = 19;
  step = twins.Begin({1}, {&slots[3], 6});
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    Twins::Enqueue(*step, 0, tensors[0], Tier::kDevice);
    step.reset();
    return 0;
  });
  EXPECT_EQ(slot.load(), 6u);
  slot = 20;
  graph.Launch();
  wait();
  EXPECT_EQ(slot.load(), 20u);
  Check(kvs_cuda_ops()->unregister_host(slots), "unregistering");
}

// The second of two steps, on another stream, does not begin before the first is done.
TEST(CudaStep, OrdersTheStreamsOfItsSteps) {
  Twins twins(Small(), {kQuestSoftmax});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  TestStream other;
  std::atomic<bool> held = true;
  const auto hold = [](void* flag) {
    while (static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
  };
  auto first = twins.Begin({1});
  Check(cudaLaunchHostFunc(twins.stream.get(), hold, &held), "a function that holds the stream");
  ASSERT_TRUE(first->End(twins.stream.get()).ok());
  const auto second = CudaStep::Begin(twins.DeviceMembers({1}), &twins.workspace, other.get(), {});
  ASSERT_TRUE(second.ok());
  // Its copies would be done long before.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  cudaError_t state = cudaErrorNotReady;
  while (state == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    state = cudaStreamQuery(other.get());
  }
  EXPECT_EQ(state, cudaErrorNotReady);
  held = false;
  Check(cudaStreamSynchronize(other.get()), "the second step");
}

// Steps on streams in turn see each other's tokens.
TEST(CudaStep, StreamsAlternate) {
  Twins twins(Small(), {kQuestSoftmax, "full"});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 300}));
  TestStream other;
  for (int i = 0; i < 6; ++i) {
    std::vector<Tensors> tensors = twins.NewTensors(2, {});
    Step host(twins.HostMembers({1, 1}), RefBackend(), InlineExecutor());
    const cudaStream_t stream = i % 2 == 0 ? other.get() : twins.stream.get();
    auto device = CudaStep::Begin(twins.DeviceMembers({1, 1}), &twins.workspace, stream, {});
    ASSERT_TRUE(device.ok()) << device.status().ToString();
    for (int layer = 0; layer < 2; ++layer) {
      Tensors& t = tensors[static_cast<size_t>(layer)];
      ASSERT_NO_FATAL_FAILURE(Twins::Enqueue(*device.value(), layer, t, Tier::kDevice));
      twins.RunHost(host, layer, t);
    }
    const std::vector<bool> equal = {twins.CompareSelections(host, *device.value(), 1, 0),
                                     twins.CompareSelections(host, *device.value(), 1, 1)};
    ASSERT_NO_FATAL_FAILURE(twins.CompareOutputs({1, 1}, equal, tensors[1], Tier::kDevice));
    ASSERT_TRUE(device.value()->End(stream).ok());
    host.End();
  }
}

}  // namespace
}  // namespace kvstrata::cuda
