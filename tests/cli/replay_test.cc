// What a replay reports, against the same numbers computed here from the trace. The client library
// is fake_client.cc: it attends in double, and refuses calls that break the C ABI's contract.
#include "client/cli/replay.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/trace_file.h"

namespace kvstrata::cli {
namespace {

constexpr int kPrompt = 1030, kSteps = 5, kTail = 8, kFirst = 300;

struct Fixture {
  Bytes64 bytes = SmallTrace(kPrompt, kSteps, kTail, {0, 1, 3}).File();
  Trace trace = Open(bytes);

  static Trace Open(const Bytes64& file) {
    auto parsed = Safetensors::Parse(file, "trace");
    auto read = Trace::FromFile(std::move(parsed).value());
    return std::move(read).value();
  }
  Result<ReplayReport> Run(const ReplayOptions& options) const {
    return Replay(trace, options, [](const char*, int32_t, int32_t) {});
  }
};

// Softmax mass that falls on the first kFirst rows and the last one, averaged over everything.
double ExpectedRecall(const Trace& trace) {
  double total = 0;
  int count = 0;
  for (const TraceLayer& layer : trace.layers()) {
    for (int t = 0; t < kSteps; ++t) {
      for (int h = 0; h < 2; ++h, ++count) {
        const uint16_t* q = layer.q + ((kTail + t) * 2 + h) * 64;
        double all = 0, chosen = 0;
        for (int row = 0; row <= kPrompt + t; ++row) {
          double dot = 0;
          for (int c = 0; c < 64; ++c)
            dot += double{FromBf16(q[c])} * FromBf16(layer.k[row * 64 + c]);
          const double w = std::exp(dot / 8);
          all += w;
          if (row < kFirst || row == kPrompt + t) chosen += w;
        }
        total += chosen / all;
      }
    }
  }
  return total / count;
}

TEST(Replay, MeasuresWhatAPlanLosesAndReads) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"first:" + std::to_string(kFirst)}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const PlanReport& plan = report->plans[0];
  EXPECT_EQ(plan.mass_recall.size(), 3u * kSteps * 2);
  EXPECT_NEAR(plan.mass_recall.Mean(), ExpectedRecall(fixture.trace), 1e-5);
  EXPECT_LE(plan.mass_recall.Percentile(5), plan.mass_recall.Mean());
  EXPECT_GT(plan.selection_error.Mean(), 0.1);
  EXPECT_DOUBLE_EQ(plan.kv_tokens.Mean(), kFirst + 1);
  // 3 layers x 1 KV head x (k and v) x 64 x 2 bytes a token; the first page of 16 lies on the host.
  EXPECT_DOUBLE_EQ(plan.host_bytes.Mean(), 3.0 * 2 * 128 * 16);
  EXPECT_DOUBLE_EQ(plan.device_bytes.Mean(), 3.0 * 2 * 128 * (kFirst + 1 - 16));
  EXPECT_GT(plan.oracle_overlap.Mean(), 0.1);  // by chance 0.29
  EXPECT_LT(plan.oracle_overlap.Mean(), 0.6);
  EXPECT_EQ(plan.selections, kSteps);
  EXPECT_EQ(plan.step_ms.size(), size_t{kSteps});
  EXPECT_EQ(plan.held_tokens, 1024u);
}

TEST(Replay, FullAgainstItselfLosesNothing) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"full"}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  for (const PlanReport* plan : {&report->reference, &report->plans[0]}) {
    EXPECT_EQ(plan->mass_recall.Mean(), 1);
    EXPECT_EQ(plan->selection_error.Percentile(95), 0);
    EXPECT_EQ(plan->oracle_overlap.Mean(), 1);
    EXPECT_DOUBLE_EQ(plan->kv_tokens.Mean(), kPrompt + (kSteps + 1) / 2.0);
    EXPECT_FALSE(plan->selections.has_value());
  }
}

TEST(Replay, StepsAndLayersMayBeFewer) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"full"}, .steps = 2, .layers = {1, 3}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->layers, std::vector<int32_t>({1, 3}));
  EXPECT_EQ(report->reference.mass_recall.size(), 2u * 2 * 2);
}

TEST(Replay, RefusesWhatTheTraceHasNot) {
  const Fixture fixture;
  EXPECT_EQ(fixture.Run({.plans = {"full"}, .steps = 6}).status().reason(), "REPLAY_STEPS");
  EXPECT_EQ(fixture.Run({.plans = {"full"}, .layers = {2}}).status().reason(), "REPLAY_LAYER");
  EXPECT_EQ(fixture.Run({.plans = {"full"}, .layers = {1, 1}}).status().reason(), "REPLAY_LAYER");
  EXPECT_EQ(fixture.Run({.plans = {"fulll"}}).status().reason(), "PLAN_UNKNOWN");
}

}  // namespace
}  // namespace kvstrata::cli
