// SPDX-License-Identifier: Apache-2.0
// Ref of cascade against selector cascade on a CPU: the same scores and the same pages.
#include "kernels/plans/chess/ops/cascade/cascade.h"
#include "tests/kernels/held_sequence.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr char kPlan[] =
    "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 2, sinks = 1, window = 2, "
    "rho = [0.7, 0.6, 0.5], min_tokens = 0, trigger = \"always\"}";

// What selector cascade read of a sequence of `tokens`.
CascadeBatch WorkOf(const HeldSequence& held, const SequenceView& view, const int32_t* tokens) {
  const Geometry& g = held.state->geometry();
  const Plan& plan = held.state->plan();
  const PageLayout layout = PageLayout::Of(g);
  CascadeBatch w;
  w.keys = {reinterpret_cast<const uint64_t*>(view.pages),
            0,
            g.page_tokens,
            g.kv_heads,
            g.head_dim,
            g.dtype,
            0,
            layout.head_stride,
            layout.slot_stride};
  w.key_layer_stride = layout.layer_stride;
  for (int level = 0; level < 3; ++level) {
    w.levels[level] = IndexRows(reinterpret_cast<const uint64_t*>(view.index_blocks), 0,
                                held.state->index(), level, 0, 0);
  }
  w.layers = g.layers;
  w.page_tokens = plan.index.unit;
  w.pages_per_chunk = plan.index.pages_per_chunk;
  w.chunks_per_grid = plan.index.chunks_per_grid;
  w.sinks = plan.cascade.sinks;
  w.window = plan.cascade.recent;
  std::ranges::copy(plan.cascade.rho, w.rho);
  w.tokens = tokens;
  w.batch = 1;
  return w;
}

TEST(CascadeRef, ChoosesAsTheSelectorDoes) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const Geometry g{2, 4, 2, 64, 16, DType::kBF16};
  const Backend& backend = **FindBackend("ref");
  for (const int32_t tokens : {1, 7, 8, 24, 25, 48, 97, 200 + random.Below(150)}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const Inputs in(g, tokens + 1, static_cast<uint64_t>(random.Below(1 << 20)));
    HeldSequence held(g, kPlan);
    RunTo(held, in, tokens, 64, backend);
    PrefillDone(held, backend);
    const SequenceView view = held.View();
    std::vector<int32_t> units(64, -1), counts = {-1};
    CascadeBatch w = WorkOf(held, view, &tokens);
    w.units = units.data();
    w.counts = counts.data();
    const std::vector<CascadeScores> scores = ScoreCascadeRef(w);
    const char* const names[] = {"page_scores", "chunk_scores", "grid_scores"};
    for (size_t level = 0; level < 3 && tokens >= w.page_tokens; ++level) {
      const auto want = Inspected<float>(held, backend, names[level]);
      ASSERT_EQ(scores[0][level].size(), want.size());
      EXPECT_LE(RelativeL2(scores[0][level], want), 1e-5);
    }
    KeepCascadeRef(w, scores);
    // The step's table: the sink page, what was kept, the window.
    const std::vector<int32_t> table = RunStep(held, in, 1, backend).selections[0].units[0];
    const int32_t pages = (tokens + w.page_tokens - 1) / w.page_tokens;
    const int32_t begin = std::min(w.sinks, std::max(pages - w.window, 0));
    const int32_t end = std::max(pages - w.window, 0);
    std::vector<int32_t> want;
    for (const int32_t page : table) {
      if (page >= begin && page < end) want.push_back(page);
    }
    ASSERT_EQ(counts[0], static_cast<int32_t>(want.size()));
    EXPECT_TRUE(std::equal(want.begin(), want.end(), units.begin()));
  }
}

TEST(CascadeRef, LeavesWhatIsNotSelected) {
  const int32_t tokens = -1;
  int32_t count = 7;
  CascadeBatch w;
  w.tokens = &tokens;
  w.counts = &count;
  w.batch = 1;
  KeepCascadeRef(w, ScoreCascadeRef(w));
  EXPECT_EQ(count, 7);
}

}  // namespace
}  // namespace kvstrata::cuda
