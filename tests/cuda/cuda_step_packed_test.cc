// SPDX-License-Identifier: Apache-2.0
// Plan mosaickv in CudaSteps: packed segments, the update buffer, damaged extents.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// Lengths are multiples of a block: where a short one is chosen, the CPU may choose one more.
TEST(CudaStep, PackedSegmentsAndTheUpdateBuffer) {
  for (const char* plan : {kMosaic, kMosaicDense, kMilder, kFullPacked}) {
    for (const auto& [dtype, batch] : {std::pair{DType::kBF16, 1}, {DType::kF16, 5}}) {
      SCOPED_TRACE(std::string(plan) + " batch " + std::to_string(batch));
      Twins twins(Small(dtype), std::vector<std::string>(static_cast<size_t>(batch), plan));
      std::vector<int32_t> lengths;
      for (int i = 0; i < batch; ++i) lengths.push_back(128 + 8 * Below(twins.rng, 25));
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));  // nothing is packed
      const size_t first = twins.sequences[0]->extents->size();
      for (int i = 0; i < 42; ++i) {
        ASSERT_NO_FATAL_FAILURE(twins.Pack());
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      EXPECT_GT(twins.sequences[0]->extents->size(), first);
      std::vector<int32_t> n = twins.Each(1);
      n[0] = 19;  // the selection of its first token
      ASSERT_NO_FATAL_FAILURE(twins.Run(n, {.dtype = dtype}));
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = DType::kF32, .gap = 16}));
      twins.ExpectFewTies();
    }
  }
}

TEST(CudaStep, PackedRowsOfOtherModels) {
  for (const auto& [query_heads, kv_heads, head_dim] :
       {std::tuple{12, 3, 128}, {8, 1, 128}, {8, 1, 256}}) {
    SCOPED_TRACE(std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " x " +
                 std::to_string(head_dim));
    Geometry g = OneLayer();
    g.query_heads = query_heads;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    Twins twins(g, {"full", kMosaic});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {160, 200}));
    for (int i = 0; i < 4; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    }
  }
}

// One graph, from before anything is packed over flushes, joins and closings; one member's prompt
// is shorter than min_tokens. Where max_loss keeps more elements than the plan says, the graph is
// captured once more, with room for them.
class GraphOfPacked : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Plans, GraphOfPacked, testing::Values(kMosaic, kMilder));

TEST_P(GraphOfPacked, StaysGoodWhileRowsArePacked) {
  Twins twins(OneLayer(), {kMosaic, kFullPacked, kMosaic, GetParam()});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 160, 304, 128}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 60; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    if (i % 20 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 3, 1}));
  }
  EXPECT_EQ(replays.captures, GetParam() == kMilder ? 2 : 1);
  twins.ExpectFewTies();
}

TEST(CudaStep, RefusesDamagedHeads) {
  Twins twins(Small(), {kMosaic});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  ASSERT_NO_FATAL_FAILURE(twins.Pack());
  TwinSequence& s = *twins.sequences[0];
  const auto begin = [&]() -> Status {
    const SequenceView view = s.DeviceView();
    KVS_RETURN_IF_ERROR(s.on_device->Refresh(view));
    return CudaStep::Begin({{s.on_device.get(), view, 1}}, &twins.workspace, twins.stream.get(), {})
        .status();
  };
  // The magic, an entry's address of keys, and a strategy that is possible but not the plan's.
  for (const auto& [at, bit] : {std::pair{0, 1}, {128 + 24 + 7, 64}, {128 + 48, 1}}) {
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
    EXPECT_EQ(begin().reason(), "EXTENT_INVALID") << at;
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
  }
  const Status sound = begin();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

}  // namespace
}  // namespace kvstrata::cuda
