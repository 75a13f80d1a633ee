// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "kernels/select/notice.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 51;
constexpr float kInf = std::numeric_limits<float>::infinity();

Geometry SmallGeometry() { return {.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64}; }

class State : public ::testing::Test {
 protected:
  const Backend& backend() const { return **FindBackend("ref"); }
  HeldSequence Held(const std::string& plan, int32_t tokens) {
    HeldSequence sequence(SmallGeometry(), plan);
    RunTo(sequence, in_, tokens, tokens, backend());
    return sequence;
  }
  Status Done(HeldSequence& s) {
    return s.state->PrefillDone(s.View(), backend(), InlineExecutor());
  }

  const Inputs in_{SmallGeometry(), 64, kSeed};
};

TEST_F(State, PromptIsCompletedOnceAndNotEmpty) {
  HeldSequence empty(SmallGeometry(), "full");
  EXPECT_EQ(Done(empty).reason(), "SEQUENCE_EMPTY");
  HeldSequence sequence = Held("full", 40);
  EXPECT_EQ(sequence.state->prompt_tokens(), -1);
  EXPECT_TRUE(Done(sequence).ok());
  EXPECT_EQ(sequence.state->prompt_tokens(), 40);
  const Status again = Done(sequence);
  EXPECT_EQ(again.code(), Code::kFailedPrecondition);
  EXPECT_EQ(again.reason(), "PREFILL_REPEATED");
}

TEST_F(State, SeriesComeInOrderAndInParts) {
  HeldSequence sequence = Held("full", 40);
  const std::vector<float> x(40, 0.5f);
  const std::vector<uint8_t> b(40, 1);
  SequenceState& state = *sequence.state;
  EXPECT_TRUE(state.Report(0, 10, x.data(), nullptr, b.data()).ok());
  EXPECT_TRUE(state.Report(10, 0, x.data(), x.data(), b.data()).ok());
  EXPECT_TRUE(state.Report(10, 30, x.data(), nullptr, b.data()).ok());
  EXPECT_TRUE(state.Report(35, 2, nullptr, x.data(), nullptr).ok());  // the first with an entropy
  EXPECT_TRUE(state.Report(39, 1, nullptr, x.data(), nullptr).ok());  // a forced token in between
  EXPECT_EQ(Inspected<float>(sequence, backend(), "surprisal"), x);
  EXPECT_EQ(Inspected<uint8_t>(sequence, backend(), "boundary"), b);
  const auto entropy = Inspected<float>(sequence, backend(), "entropy");
  ASSERT_EQ(entropy.size(), 40u);
  for (int t = 0; t < 40; ++t) {
    EXPECT_EQ(std::isnan(entropy[t]), t < 35 || t == 37 || t == 38) << t;
  }
}

TEST_F(State, BadReportsNameWhatIsWrongAndChangeNothing) {
  HeldSequence sequence = Held("full", 40);
  const std::vector<float> good(40, 0.5f);
  const std::vector<uint8_t> boundary(40, 0);
  SequenceState& state = *sequence.state;
  ASSERT_TRUE(state.Report(0, 8, good.data(), good.data(), boundary.data()).ok());
  const auto expect = [](const Status& s, const char* reason, const char* words) {
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << s.ToString();
    EXPECT_EQ(s.reason(), reason);
    EXPECT_THAT(s.message(), HasSubstr(words));
  };
  expect(state.Report(8, 33, good.data(), nullptr, nullptr), "REPORT_RANGE", "[8, 41)");
  expect(state.Report(-1, 3, good.data(), nullptr, nullptr), "REPORT_RANGE", "[-1, 2)");
  expect(state.Report(8, -3, good.data(), nullptr, nullptr), "REPORT_RANGE", "40 tokens");
  expect(state.Report(2147483647, 2147483647, nullptr, good.data(), nullptr), "REPORT_RANGE", "40");
  expect(state.Report(9, 2, good.data(), nullptr, nullptr), "REPORT_ORDER",
         "a gap; go on at position 8");
  expect(state.Report(9, 2, nullptr, nullptr, boundary.data()), "REPORT_ORDER", "boundary");
  expect(state.Report(7, 2, nullptr, good.data(), nullptr), "REPORT_ORDER", "already reported");
  for (const float bad : {-0.5f, kInf, std::nanf("")}) {
    const float values[] = {1.0f, bad};
    expect(state.Report(8, 2, values, nullptr, nullptr), "REPORT_VALUE", "surprisal of position 9");
    expect(state.Report(8, 2, good.data(), values, nullptr), "REPORT_VALUE",
           "entropy of position 9");
  }
  const uint8_t two[] = {2};
  expect(state.Report(8, 1, good.data(), good.data(), two), "REPORT_VALUE",
         "boundary of position 8 is 2");
  EXPECT_EQ(Inspected<float>(sequence, backend(), "surprisal").size(), 8u);
  EXPECT_EQ(Inspected<float>(sequence, backend(), "entropy").size(), 8u);
}

TEST_F(State, SeriesOfAHeldPrefixMayBeSkipped) {
  HeldSequence sequence = Held("full", 32);
  sequence.state = std::make_unique<SequenceState>(SmallGeometry(), PlanOf("full"), 32, 32);
  RunTo(sequence, in_, 40, 8, backend());
  const std::vector<float> x(8, 0.5f);
  SequenceState& state = *sequence.state;
  const std::vector<uint8_t> ends(8, 1);
  const Status gap = state.Report(34, 6, x.data(), nullptr, nullptr);
  EXPECT_EQ(gap.reason(), "REPORT_ORDER");
  EXPECT_THAT(gap.message(), HasSubstr("a gap; go on at position 32 or 33"));
  const Status boundary = state.Report(33, 7, nullptr, nullptr, ends.data());
  EXPECT_THAT(boundary.message(),
              HasSubstr("boundary from position 33: a gap; go on at position 32"));
  EXPECT_THAT(boundary.message(), testing::Not(HasSubstr(" or ")));
  EXPECT_TRUE(state.Report(32, 0, x.data(), nullptr, nullptr).ok());  // changes nothing
  EXPECT_TRUE(state.Report(31, 5, x.data(), nullptr, nullptr).ok());
  EXPECT_EQ(state.Report(0, 4, x.data(), nullptr, nullptr).reason(), "REPORT_ORDER");
  EXPECT_EQ(state.Report(37, 3, x.data(), nullptr, nullptr).reason(), "REPORT_ORDER");
}

// It may be the prompt's last: then there is nothing else to report.
TEST_F(State, AReportOfNothingSkipsTheFirstPositionToo) {
  HeldSequence sequence = Held("full", 32);
  sequence.state = std::make_unique<SequenceState>(SmallGeometry(), PlanOf("full"), 32, 32);
  RunTo(sequence, in_, 33, 1, backend());
  const float none = 0;
  ASSERT_TRUE(sequence.state->Report(33, 0, &none, nullptr, nullptr).ok());
  EXPECT_EQ(Inspected<float>(sequence, backend(), "surprisal").size(), 33u);
}

// Nothing that was computed here predicts the token behind a held prefix.
TEST_F(State, SurprisalMaySkipTheFirstPositionBehindAHeldPrefix) {
  for (const int32_t held : {0, 32}) {
    HeldSequence sequence = Held("full", held);
    sequence.state = std::make_unique<SequenceState>(SmallGeometry(), PlanOf("full"), held, held);
    RunTo(sequence, in_, 40, 40 - held, backend());
    const std::vector<float> x(40, 0.5f);
    SequenceState& state = *sequence.state;
    EXPECT_EQ(state.reported().SkippedPosition(held, x.data()), -1);
    EXPECT_EQ(state.reported().SkippedPosition(held + 1, nullptr), -1);
    EXPECT_EQ(state.reported().SkippedPosition(held + 1, x.data()), held);
    ASSERT_TRUE(state.Report(held + 1, 3, x.data(), nullptr, nullptr).ok());
    EXPECT_EQ(state.reported().SkippedPosition(held + 1, x.data()), -1);
    const auto all = Inspected<float>(sequence, backend(), "surprisal");
    ASSERT_EQ(all.size(), static_cast<size_t>(held) + 4);
    for (int32_t t = 0; t < held; ++t) EXPECT_TRUE(std::isnan(all[static_cast<size_t>(t)]));
    EXPECT_EQ(all[static_cast<size_t>(held)], 0);
    EXPECT_EQ(all.back(), 0.5f);
    const Status again = state.Report(held + 1, 3, x.data(), nullptr, nullptr);
    EXPECT_THAT(again.message(),
                HasSubstr("already reported; go on at position " + std::to_string(held + 4)));
  }
}

TEST_F(State, ForksReportOnTheirOwn) {
  HeldSequence parent = Held("full", 40);
  const std::vector<float> x(40, 0.5f);
  ASSERT_TRUE(parent.state->Report(0, 20, x.data(), nullptr, nullptr).ok());
  HeldSequence child(parent);
  EXPECT_TRUE(child.state->Report(20, 20, x.data(), nullptr, nullptr).ok());
  EXPECT_EQ(Inspected<float>(parent, backend(), "surprisal").size(), 20u);
  EXPECT_EQ(Inspected<float>(child, backend(), "surprisal").size(), 40u);
}

TEST_F(State, StatusSaysWhichInputIsMissing) {
  const auto after_decode = [&](const std::string& plan, bool report) {
    HeldSequence sequence = Held(plan, 40);
    EXPECT_TRUE(Done(sequence).ok());
    RunTo(sequence, in_, 48, 1, backend());
    const std::vector<float> x(8, 0.5f);
    if (report) {
      EXPECT_TRUE(sequence.state->Report(40, 8, nullptr, x.data(), nullptr).ok());
    }
    return sequence.state->StatusText(sequence.View());
  };
  const std::string chess = "chess{min_tokens = 0, every = 3, thresholds = ";
  EXPECT_EQ(after_decode("full", false), "ok");
  EXPECT_EQ(after_decode("quest{min_tokens = 0}", false), "ok");
  EXPECT_EQ(after_decode(chess + "[0.5, 0.5]}", true), "ok");
  EXPECT_THAT(after_decode(chess + "[0.5, 0.5]}", false), HasSubstr("no entropy was reported"));
  EXPECT_THAT(after_decode(chess + "[0.5, 0.5]}", false), HasSubstr("every 3 pages"));
  EXPECT_THAT(after_decode(chess + "[0.5, inf]}", true), HasSubstr("thresholds are not set"));
  EXPECT_EQ(after_decode(chess + "[0.5, inf], combine = \"or\"}", true), "ok");
  EXPECT_EQ(after_decode("chess{min_tokens = 0, trigger = \"every\"}", false), "ok");
  const auto in_prompt = [&](const std::string& plan) {
    HeldSequence sequence = Held(plan, 40);
    return sequence.state->StatusText(sequence.View());
  };
  EXPECT_EQ(in_prompt("quest{min_tokens = 40}"), Say(Notice::kPromptOpen));
  EXPECT_EQ(in_prompt("tokenselect{min_tokens = 40}"), "ok");
  EXPECT_EQ(in_prompt("quest{min_tokens = 41}"), Say(Notice::kShort, {40, 41}));
  EXPECT_EQ(in_prompt("quest{min_tokens = 536870912}"), Say(Notice::kNeverPays, {536870912}));
  EXPECT_EQ(in_prompt("full{codec = \"packed\"}"), Say(Notice::kShort, {40, 4096}));
  EXPECT_EQ(in_prompt("full"), "ok");
}

}  // namespace
}  // namespace kvstrata
