// SPDX-License-Identifier: Apache-2.0
// Graphs of CudaSteps: an engine's, captured once and replayed over later steps, and the library's
// own, of calls that repeat.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// Lengths grow, page and unit boundaries are crossed, tables grow, and steps of other shapes run in
// between.
void ServeLaterSteps(const std::vector<std::string>& plans) {
  Twins twins(Small(), plans, 2 * kCapacity);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {140, 200, 333, 160, 149, 170}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // all buffers are there
  Replays replays(twins);
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    if (i % 10 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 9, 1, 3, 2}));
  }
  EXPECT_EQ(replays.captures, 1);
  // Beyond what the tables have room for: the graph is stale, and only then.
  ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 700, 1, 1, 1}));
  for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 2);
  EXPECT_EQ(replays.refused, 2);
  twins.ExpectFewTies();
}

TEST(CudaStep, CapturedLayersServeLaterSteps) {
  ServeLaterSteps({kQuest, kQuestSoftmax, kQuestSoftmax, "full", kWindow, kChess});
}

// Groups are sealed by the Begin behind the step that completed them.
TEST(CudaStep, CapturedLayersVoteByKeysInFewBits) {
  ServeLaterSteps({kBits, kMissed, kFourBits, "full", kThreeBits, kQuest});
}

// Without kQuestSoftmax, new rows are left to the captured attention.
TEST(CudaStep, CapturedAttentionTakesNewRows) {
  ServeLaterSteps({kQuest, kQuest, kQuest, "full", kWindow, kChess});
}

// What was left to an attention that never came is on its page when the step ends.
TEST(CudaStep, NewRowsThatNothingAttendsAreAppended) {
  Twins twins(Small(), {"full", kWindow});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {170, 133}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // all buffers are there
  std::vector<Tensors> tensors = twins.NewTensors(2, {});
  for (Tensors& t : tensors) t.Draw(twins.rng);
  kvstrata::Step host(twins.HostMembers({1, 1}), RefBackend(), InlineExecutor());
  const auto device = twins.Begin({1, 1});
  ASSERT_NE(device, nullptr);
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    for (int layer = 0; layer < twins.geometry.layers; ++layer) {
      const Tensors& t = tensors[static_cast<size_t>(layer)];
      EXPECT_TRUE(device->Append(layer, t.k.On(Tier::kDevice), t.v.On(Tier::kDevice)).ok());
    }
    return 0;
  });
  graph.Launch();
  ASSERT_TRUE(device->End(twins.stream.get()).ok());
  for (int layer = 0; layer < twins.geometry.layers; ++layer) {
    twins.RunHost(host, layer, tensors[static_cast<size_t>(layer)]);
  }
  host.End();
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // attends them
}

// Captured while all members are shorter than min_tokens, a graph selects nothing, and is stale
// once one is longer; the one captured then serves short members, too.
TEST(CudaStep, AGraphOfShortMembersIsStaleOnceOneIsLonger) {
  for (const char* plan : {"quest{budget = 64, min_tokens = 150}", kTokens, kBits}) {
    SCOPED_TRACE(plan);
    Twins twins(OneLayer(), {plan, "full", plan});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {130, 300, 120}));
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    Replays replays(twins);
    for (int i = 0; i < 15; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
    EXPECT_EQ(replays.captures, 1);
    for (int i = 0; i < 25; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());  // 150 tokens
    EXPECT_EQ(replays.captures, 2);
    EXPECT_EQ(replays.refused, 2);
    // Short ones again, in the same places.
    for (const size_t i : {0, 2}) {
      twins.sequences[i] =
          std::make_unique<TwinSequence>(twins.rng, twins.geometry, plan, twins.capacity);
    }
    ASSERT_NO_FATAL_FAILURE(twins.Run({100, 1, 110}));
    for (const size_t i : {0, 2}) {
      ASSERT_NO_FATAL_FAILURE(twins.sequences[i]->ClosePrompt(RefBackend()));
    }
    for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
    EXPECT_EQ(replays.captures, 2);
    twins.ExpectFewTies();
  }
}

TEST(CudaStep, RefusesUnderCapture) {
  Twins twins(Small(), {kQuestSoftmax});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  std::vector<Tensors> tensors = twins.NewTensors(1, {.dtype = DType::kF32});
  auto step = twins.Begin({1});
  ASSERT_NE(step, nullptr);
  Tensors& t = tensors[0];
  EXPECT_EQ(step->ReadSelection(0).status().reason(), "SELECTION_NONE");
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    EXPECT_EQ(step->Append(0, t.k.On(Tier::kHost), t.v.On(Tier::kHost)).reason(),
              "CAPTURE_HOST_TENSOR");
    EXPECT_TRUE(step->Append(0, t.k.On(Tier::kDevice), t.v.On(Tier::kDevice)).ok());
    EXPECT_EQ(step->Attend(0, t.q.On(Tier::kHost), t.out.Out(Tier::kDevice), nullptr).reason(),
              "CAPTURE_HOST_TENSOR");
    // fp32 queries are copied, into memory that is not there yet.
    EXPECT_EQ(step->Attend(0, t.q.On(Tier::kDevice), t.out.Out(Tier::kDevice), nullptr).reason(),
              "CAPTURE_ALLOCATES");
    EXPECT_EQ(step->ReadSelection(0).status().reason(), "CAPTURE_READ");
    EXPECT_EQ(step->End(twins.stream.get()).reason(), "CAPTURE_END");
    const auto another =
        CudaStep::Begin(twins.DeviceMembers({1}), &twins.workspace, twins.stream.get(), {});
    EXPECT_EQ(another.status().reason(), "WORKSPACE_BUSY");
    CudaWorkspace own(*kvs_cuda_ops(), twins.geometry);
    EXPECT_EQ(
        CudaStep::Begin(twins.DeviceMembers({1}), &own, twins.stream.get(), {}).status().reason(),
        "CAPTURE_BEGIN");
    return 0;
  });
  EXPECT_EQ(step->Replay().reason(), "GRAPH_STALE");
}

// An engine that calls layer by layer with the same tensors: its calls become graphs of the
// library's own, which go when buffers grow and stay when steps of other shapes run in between.
TEST(CudaStep, RepeatedCallsBecomeGraphs) {
  for (const std::vector<std::string>& plans :
       {std::vector<std::string>{kQuest, kQuestSoftmax, kQuestSoftmax, "full"},
        {kTokens, kTokens, kChess},
        {kSentences, kQuest},
        {kBits, kMissed, kFourBits},
        {kMosaic},
        {kPlanes, kFinePlanes}}) {
    SCOPED_TRACE(plans.front());
    Twins twins(Small(), plans, 2 * kCapacity);
    std::vector<int32_t> lengths;
    for (size_t i = 0; i < plans.size(); ++i) lengths.push_back(136 + 8 * Below(twins.rng, 25));
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
    std::vector<Tensors> tensors = twins.NewTensors(static_cast<int32_t>(plans.size()), {});
    const auto run = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        for (Tensors& t : tensors) t.Draw(twins.rng);
        ASSERT_NO_FATAL_FAILURE(twins.Pack());
        ASSERT_NO_FATAL_FAILURE(twins.RunWith(twins.Each(1), tensors, Tier::kDevice));
      }
    };
    ASSERT_NO_FATAL_FAILURE(run(20));
    const int graphs = twins.workspace.call_graphs();
    EXPECT_GT(graphs, 0);
    std::vector<int32_t> n = twins.Each(1);
    n[0] = 3;
    ASSERT_NO_FATAL_FAILURE(twins.Run(n));
    EXPECT_EQ(twins.workspace.call_graphs(), graphs);
    tensors = twins.NewTensors(static_cast<int32_t>(plans.size()), {});  // elsewhere
    ASSERT_NO_FATAL_FAILURE(run(6));
    n[0] = 1200;  // beyond what the tables have room for
    ASSERT_NO_FATAL_FAILURE(twins.Run(n));
    EXPECT_EQ(twins.workspace.call_graphs(), 0);
    ASSERT_NO_FATAL_FAILURE(run(12));  // what is packed of the chunk lets tables grow once more
    EXPECT_GT(twins.workspace.call_graphs(), 0);
    twins.ExpectFewTies();
  }
}

}  // namespace
}  // namespace kvstrata::cuda
