// SPDX-License-Identifier: Apache-2.0
// What a replay reports, against the same numbers computed here from the trace. The client library
// is fake_client.cc: it attends in double, and refuses calls that break the C ABI's contract.
#include "client/cli/replay.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <numeric>

#include "client/cli/oracle.h"
#include "tests/cli/fake_client.h"
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
  static Trace Open(Bytes64&&) = delete;  // a trace is a view of its bytes
  Result<ReplayReport> Run(const ReplayOptions& options) const {
    return Replay(trace, options, [](const char*, int32_t, int32_t) {});
  }
};

struct Sum {
  double total = 0;
  int count = 0;
  void Add(double x) {
    total += x;
    ++count;
  }
  double Mean() const { return total / count; }
};

// Softmax weights of query head h at step t over all rows, from the definition.
std::vector<double> Weights(const TraceLayer& layer, int t, int h) {
  const uint16_t* q = layer.q + ((kTail + t) * 2 + h) * 64;
  std::vector<double> weights;
  double all = 0;
  for (int row = 0; row <= kPrompt + t; ++row) {
    double dot = 0;
    for (int c = 0; c < 64; ++c) dot += double{FromBf16(q[c])} * FromBf16(layer.k[row * 64 + c]);
    weights.push_back(std::exp(dot / 8));
    all += weights.back();
  }
  for (double& w : weights) w /= all;
  return weights;
}

// Mean over everything of the mass that falls on the first rows of each head and the last one.
double ExpectedRecall(const Trace& trace, int first, int more_per_head) {
  Sum recall;
  for (const TraceLayer& layer : trace.layers()) {
    for (int t = 0; t < kSteps; ++t) {
      for (int h = 0; h < 2; ++h) {
        const std::vector<double> weights = Weights(layer, t, h);
        double chosen = weights.back();
        for (int row = 0; row < first + more_per_head * h; ++row) chosen += weights[row];
        recall.Add(chosen);
      }
    }
  }
  return recall.Mean();
}

// Relative error of attending kFirst rows and the last one, of values that are `factor` as large,
// against everything (first) and against the same rows of right values (second).
std::pair<double, double> ExpectedErrors(const Trace& trace, double factor) {
  Sum selection, codec;
  for (const TraceLayer& layer : trace.layers()) {
    for (int t = 0; t < kSteps; ++t) {
      for (int h = 0; h < 2; ++h) {
        const std::vector<double> weights = Weights(layer, t, h);
        double mass = weights.back(), off = 0, scaled = 0, norm = 0;
        for (int row = 0; row < kFirst; ++row) mass += weights[row];
        for (int c = 0; c < 64; ++c) {
          double full = 0, some = 0;
          for (size_t row = 0; row < weights.size(); ++row) {
            const double part = weights[row] * FromBf16(layer.v[row * 64 + c]);
            full += part;
            if (row < kFirst || row + 1 == weights.size()) some += part / mass;
          }
          off += (some - full) * (some - full);
          scaled += (factor - 1) * (factor - 1) * some * some;
          norm += full * full;
        }
        selection.Add(std::sqrt(off / norm));
        codec.Add(std::sqrt(scaled / norm));
      }
    }
  }
  return {selection.Mean(), codec.Mean()};
}

TEST(Replay, MeasuresWhatAPlanLosesAndReads) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"first:" + std::to_string(kFirst)}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const PlanReport& plan = report->plans[0];
  EXPECT_EQ(plan.mass_recall.size(), 3u * kSteps * 2);
  EXPECT_NEAR(plan.mass_recall.Mean(), ExpectedRecall(fixture.trace, kFirst, 0), 1e-5);
  EXPECT_LE(plan.mass_recall.Percentile(5), plan.mass_recall.Mean());
  EXPECT_FALSE(plan.sampled);
  EXPECT_NEAR(plan.output_error.Mean(), ExpectedErrors(fixture.trace, 1).first, 1e-5);
  EXPECT_EQ(plan.selection_error.Mean(), plan.output_error.Mean());
  EXPECT_EQ(plan.codec_error.Mean(), 0);
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

TEST(Replay, ALossyCodecIsMeasuredFromTheTrace) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"lossy:" + std::to_string(kFirst)}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const PlanReport& plan = report->plans[0];
  EXPECT_TRUE(plan.sampled);
  EXPECT_FALSE(plan.raw);
  // 5 steps and 3 layers are fewer than the sample holds: it is everything. Twice the mass is what
  // its log-sum-exp claims.
  EXPECT_EQ(plan.mass_recall.size(), 3u * kSteps * 2);
  EXPECT_NEAR(plan.mass_recall.Mean(), ExpectedRecall(fixture.trace, kFirst, 0), 1e-9);
  const auto [selection, codec] = ExpectedErrors(fixture.trace, 1.25);
  EXPECT_NEAR(plan.selection_error.Mean(), selection, 1e-5);
  EXPECT_NEAR(plan.codec_error.Mean(), codec, 1e-5);
  EXPECT_GT(plan.output_error.Mean(), selection);
  EXPECT_DOUBLE_EQ(plan.kv_tokens.Mean(), kFirst + 1);
}

TEST(Replay, RestIsMeasuredFromTheTrace) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"rest:" + std::to_string(kFirst)}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const PlanReport& plan = report->plans[0];
  EXPECT_TRUE(plan.sampled);
  EXPECT_TRUE(plan.raw);
  EXPECT_NEAR(plan.mass_recall.Mean(), ExpectedRecall(fixture.trace, kFirst, 0), 1e-9);
  EXPECT_GT(plan.codec_error.Mean(), 0.1);
  EXPECT_DOUBLE_EQ(plan.host_bytes.Mean(), 3.0 * 2 * 128 * 16);
}

TEST(Replay, CostsAreSummedOverLayers) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"lossy:" + std::to_string(kFirst), "full"}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const StepCosts& lossy = report->plans[0].costs;
  EXPECT_DOUBLE_EQ(lossy.rows.Mean(), 3.0 * (kFirst + 1));
  EXPECT_DOUBLE_EQ(lossy.coarse_rows.Mean(), 9);
  EXPECT_DOUBLE_EQ(lossy.attend_bytes.Mean(), 3.0 * 80 * (kFirst + 1 + 3));
  EXPECT_DOUBLE_EQ(lossy.select_bytes.Mean(), 3000);
  EXPECT_EQ(lossy.rows.size(), size_t{kSteps});
  const StepCosts& full = report->plans[1].costs;
  EXPECT_DOUBLE_EQ(full.rows.Mean(), 3 * (kPrompt + (kSteps + 1) / 2.0));
  EXPECT_EQ(full.select_bytes.Mean(), 0);
}

TEST(Replay, EveryQueryHeadMayHaveItsList) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"heads:" + std::to_string(kFirst)}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const PlanReport& plan = report->plans[0];
  EXPECT_NEAR(plan.mass_recall.Mean(), ExpectedRecall(fixture.trace, kFirst, 10), 1e-5);
  EXPECT_DOUBLE_EQ(plan.kv_tokens.Mean(), kFirst + 5 + 1);
  EXPECT_DOUBLE_EQ(plan.device_bytes.Mean() + plan.host_bytes.Mean(),
                   3.0 * 2 * 128 * (2 * kFirst + 10 + 2));
  EXPECT_LT(plan.oracle_overlap.Mean(), 0.6);
}

TEST(Replay, TimingAloneMeasuresNothingElse) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"first:10"}, .timing_only = true});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->plans[0].step_ms.size(), size_t{kSteps});
  EXPECT_DOUBLE_EQ(report->plans[0].costs.rows.Mean(), 33);
  EXPECT_EQ(report->plans[0].mass_recall.size(), 0u);
  EXPECT_TRUE(report->overlap_steps.empty());
}

TEST(Replay, ALibraryThatListsNonsenseIsRefused) {
  const Fixture fixture;
  fake_library.list_backwards = true;
  const auto report = fixture.Run({.plans = {"full"}});
  fake_library = {};
  EXPECT_EQ(report.status().reason(), "REPLAY_POSITIONS");
}

TEST(Oracle, MassAndAttentionOverNoRows) {
  const Fixture fixture;
  const Oracle oracle(fixture.trace.shape(), fixture.trace.layers()[0], 2);
  EXPECT_EQ(oracle.MassOn(1, {}), 0);
  EXPECT_EQ(oracle.AttendOver(1, {}), std::vector<double>(64));
  const std::vector<int32_t> one = {7};
  const std::vector<double> value = oracle.AttendOver(0, one);
  for (size_t c = 0; c < 64; ++c) {
    EXPECT_EQ(value[c], FromBf16(fixture.trace.layers()[0].v[7 * 64 + c]));
  }
  EXPECT_NEAR(oracle.MassOn(1, one), Weights(fixture.trace.layers()[0], 2, 1)[7], 1e-12);
}

// Both rotated to their own positions by hand, as complex numbers.
TEST(Oracle, RotatesWhatIsStoredBeforeRotaryEmbedding) {
  for (const bool interleaved : {false, true}) {
    TraceFile file = SmallTrace(40, 2, 0, {0});
    file.metadata["keys"] = "pre_rope";
    file.metadata["rope_theta"] = "100";
    file.metadata["rope_dim"] = "48";
    file.metadata["rope_interleaved"] = interleaved ? "1" : "0";
    const Bytes64 bytes = file.File();
    const Trace trace = Fixture::Open(bytes);
    const TraceLayer& layer = trace.layers()[0];
    const auto rotated = [&](const uint16_t* row, int position) {
      std::vector<double> x(64);
      for (size_t c = 0; c < 64; ++c) x[c] = FromBf16(row[c]);
      for (int i = 0; i < 24; ++i) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : 24 + i;
        const auto z = std::complex<double>(x[a], x[b]) *
                       std::polar(1.0, position * std::exp(-std::log(100.0) * i / 24));
        x[a] = z.real(), x[b] = z.imag();
      }
      return x;
    };
    const std::vector<double> q = rotated(layer.q + (1 * 2 + 1) * 64, 41);  // step 1, head 1
    std::vector<double> weights;
    for (int row = 0; row <= 41; ++row) {
      const std::vector<double> k = rotated(layer.k + row * 64, row);
      weights.push_back(std::exp(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / 8));
    }
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    const Oracle oracle(trace.shape(), layer, 1);
    for (int32_t row = 0; row <= 41; ++row) {
      EXPECT_NEAR(oracle.MassOn(1, {&row, 1}), weights[row] / all, 1e-9) << row;
    }
  }
}

TEST(Prefix, StepsFollowTheShorterPrompt) {
  const Fixture fixture;
  const Trace prefix = fixture.trace.Prefix(100);
  EXPECT_EQ(prefix.shape().prompt, 100);
  EXPECT_EQ(prefix.tokens().size(), 100u + kSteps);
  EXPECT_EQ(prefix.surprisal().size(), 100u);
  EXPECT_EQ(prefix.boundary().size(), 100u + kSteps);
  EXPECT_EQ(prefix.layers()[1].q, fixture.trace.layers()[1].q + kTail * 128);
  EXPECT_EQ(fixture.trace.shape().tail, kTail);
  const auto report = Replay(prefix, {.plans = {"full"}, .timing_only = true},
                             [](const char*, int32_t, int32_t) {});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_DOUBLE_EQ(report->reference.costs.rows.Mean(), 3 * 103.0);
}

TEST(Replay, FullAgainstItselfLosesNothing) {
  const Fixture fixture;
  const auto report = fixture.Run({.plans = {"full"}});
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  for (const PlanReport* plan : {&report->reference, &report->plans[0]}) {
    EXPECT_EQ(plan->mass_recall.Mean(), 1);
    EXPECT_EQ(plan->output_error.Percentile(95), 0);
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
