// SPDX-License-Identifier: Apache-2.0
// Tokens that are taken back leave nothing: what follows is what a sequence gives that never had
// them.
#include "gmock/gmock.h"
#include "kernels/step/step.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using Floats = std::vector<float>;
using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr uint64_t kSeed = 43;
constexpr int32_t kPrompt = 300, kEnd = 360;

constexpr const char* kPlans[] = {
    "full",
    "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
    "quest{budget = 64, min_tokens = 0}",
    "quest{page = 32, group = \"softmax\", budget = 64, min_tokens = 0}",
    "quest{score = \"deviation\", budget = 64, min_tokens = 0}",
    "bits{budget = 64, unit = 16, recent = 8, min_tokens = 0}",
    "bits{budget = 64, unit = 16, recent = 8, run = 8, min_tokens = 0}",
    "tokenselect{k = 40, n_init = 4, n_local = 16, theta = 0.2, min_tokens = 0}",
    "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 3, window = 3, rho = [0.6, 0.6, 0.5], "
    "trigger = \"every\", every = 2, min_tokens = 0}",
    "chess{page = 8, window = 2, rho = [1, 1, 0.3], trigger = \"every\", every = 2, min_tokens = "
    "0, "
    "lists = \"head\", anchor = \"query\"}",
    "sentencekv{tau = 60, n_obs = 16, recent = 4, start = 4, min_tokens = 0}"};

class Truncation : public EachBackend {
 protected:
  Geometry geometry_{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64};
  Inputs in_{geometry_, kEnd + 8, kSeed}, drafts_{geometry_, kEnd + 8, kSeed + 1};

  // A sentence ends at each ninth token.
  static void ReportBoundaries(SequenceState* state, int32_t first) {
    std::vector<uint8_t> ends;
    for (int32_t t = first; t < state->tokens(); ++t) ends.push_back(t % 9 == 8 ? 1 : 0);
    const auto n = static_cast<int32_t>(ends.size());
    const Status status = state->Report(first, n, nullptr, nullptr, ends.data());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  void Prefill(HeldSequence* s) {
    RunStep(*s, in_, kPrompt, backend());
    ReportBoundaries(s->state.get(), 0);
    PrefillDone(*s, backend());
  }
  // The output of the step's first token.
  Floats First(const StepResult& r, int32_t n) const {
    const int64_t row = int64_t{geometry_.query_heads} * geometry_.head_dim;
    Floats out;
    for (int layer = 0; layer < geometry_.layers; ++layer) {
      const auto begin = r.out.begin() + layer * n * row;
      out.insert(out.end(), begin, begin + row);
    }
    return out;
  }
  Floats Decode(HeldSequence* s, const Inputs& in) {
    const int32_t at = s->state->tokens();
    const Floats out = First(RunStep(*s, in, 1, backend()), 1);
    ReportBoundaries(s->state.get(), at);
    return out;
  }
};

// As speculative decoding does: each step brings a token that stays and three that do not.
TEST_P(Truncation, RejectedDraftsLeaveNothing) {
  Inputs mixed = in_;
  for (const char* plan : kPlans) {
    HeldSequence plain(geometry_, plan), drafting(geometry_, plan);
    Prefill(&plain);
    Prefill(&drafting);
    while (plain.state->tokens() < kEnd) {
      const int32_t at = plain.state->tokens();
      const auto draft = [at](const Inputs& from, const Floats& rows, Floats* to) {
        const auto each = static_cast<int64_t>(rows.size()) / from.n;
        std::copy_n(rows.begin() + (at + 1) * each, 3 * each, to->begin() + (at + 1) * each);
      };
      draft(drafts_, drafts_.keys, &mixed.keys);
      draft(drafts_, drafts_.values, &mixed.values);
      const Floats expected = Decode(&plain, in_);
      const StepResult r = RunStep(drafting, mixed, 4, backend());
      drafting.state->Truncate(at + 1);
      ReportBoundaries(drafting.state.get(), at);
      // Steps of several tokens run another kernel.
      ASSERT_THAT(First(r, 4), Pointwise(FloatNear(1e-5f), expected)) << plan << ", token " << at;
      draft(in_, in_.keys, &mixed.keys);
      draft(in_, in_.values, &mixed.values);
    }
  }
}

TEST_P(Truncation, BackToThePromptIsAsNeverDecoded) {
  for (const char* plan : kPlans) {
    HeldSequence plain(geometry_, plan), other(geometry_, plan);
    Prefill(&plain);
    Prefill(&other);
    while (other.state->tokens() < kPrompt + 45) Decode(&other, drafts_);
    Settle(other, backend());
    other.state->Truncate(kPrompt);
    EXPECT_EQ(other.state->tokens(), kPrompt);
    while (plain.state->tokens() < kEnd) {
      ASSERT_EQ(Decode(&other, in_), Decode(&plain, in_))
          << plan << ", token " << plain.state->tokens() - 1;
    }
  }
}

TEST_P(Truncation, KeepsTheIdsThatTheTailNeeds) {
  SequenceState state(geometry_, PlanOf("full"), 0, 0);
  std::vector<int32_t> ids(40);
  for (int32_t i = 0; i < 40; ++i) ids[static_cast<size_t>(i)] = 100 + i;
  state.reported().NoteTokens(0, ids, {});
  EXPECT_THAT(state.TailIds(18), ::testing::ElementsAre(116, 117));
  EXPECT_THAT(state.TailIds(32), ::testing::IsEmpty());
  EXPECT_THAT(state.TailIds(41), ::testing::IsEmpty());
}

KVS_FOR_EACH_BACKEND(Truncation);

}  // namespace
}  // namespace kvstrata
