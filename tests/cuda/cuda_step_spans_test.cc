// SPDX-License-Identifier: Apache-2.0
// Plan sekv in CudaSteps: spans of codec lowrank.
#include "tests/cuda/step_plans.h"
#include "tests/cuda/step_replays.h"

namespace kvstrata::cuda {
namespace {

// About exponential, as surprisal is.
std::vector<float> SurprisalOf(Rng& rng, int32_t n) {
  std::exponential_distribution<float> nats(1.0f);
  std::vector<float> surprisal(static_cast<size_t>(n));
  for (float& x : surprisal) x = nats(rng);
  return surprisal;
}

void Recompress(Twins& twins, size_t i) {
  TwinSequence& s = *twins.sequences[i];
  ASSERT_NO_FATAL_FAILURE(
      s.Recompress(twins.geometry, SurprisalOf(twins.rng, s.on_host->prompt_tokens())));
  ASSERT_GT(s.extents->size(), 0u);
}

// Plan sekv: before its spans are there it attends in full, and beside other plans.
TEST(CudaStep, AttendsSpans) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Twins twins(Small(dtype), {kSpans, "full", kLongSpans, kSpans, kSpans});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {400, 200, 333, 260, 290}));
    for (const size_t i : {0, 2, 3}) ASSERT_NO_FATAL_FAILURE(Recompress(twins, i));
    for (int i = 0; i < 5; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
    }
    ASSERT_NO_FATAL_FAILURE(twins.Run({3, 1, 2, 1, 4}, {.dtype = dtype}));
    ASSERT_NO_FATAL_FAILURE(Recompress(twins, 4));
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
    twins.ExpectFewTies();
  }
}

TEST(CudaStep, OneGraphServesSpans) {
  Twins twins(Small(), {kSpans, kSpans, kLongSpans});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {400, 250, 333}));
  for (const size_t i : {0, 2}) ASSERT_NO_FATAL_FAILURE(Recompress(twins, i));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 12; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    // Fewer spans than another member has: the tables have room.
    if (i != 6) continue;
    ASSERT_NO_FATAL_FAILURE(Recompress(twins, 1));
  }
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

}  // namespace
}  // namespace kvstrata::cuda
