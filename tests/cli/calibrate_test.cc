// SPDX-License-Identifier: Apache-2.0
// What a calibration reports: series against numbers of tests/reference/chess.py and
// tests/reference/sekv.py for the same input, cosines and break-even lengths worked out by hand,
// the daemon's part on fake_client.cc.
#include "client/cli/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>

#include "client/cli/calibration_document.h"
#include "tests/cli/fake_client.h"
#include "tests/cli/trace_file.h"

namespace kvstrata::cli {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// The series that the expected numbers were computed from in Python.
std::vector<float> Series(int n, uint64_t seed) {
  std::vector<float> out;
  for (uint64_t x = seed; n > 0; --n) {
    x = (1103515245 * x + 12345) % (uint64_t{1} << 31);
    const double v = static_cast<double>((x >> 8) % 100);
    out.push_back(static_cast<float>(v * v / 1000));
  }
  return out;
}

// Traces and the bytes that they point into.
class Traces {
 public:
  void Add(const TraceFile& file) {
    bytes_.push_back(std::make_unique<Bytes64>(file.File()));
    auto parsed = Safetensors::Parse(*bytes_.back(), "trace");
    auto trace = Trace::FromFile(std::move(parsed).value());
    traces_.push_back(std::move(trace).value());
    names_.push_back("t" + std::to_string(names_.size()));
  }
  const std::vector<Trace>& all() const { return traces_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::vector<std::unique_ptr<Bytes64>> bytes_;
  std::vector<Trace> traces_;
  std::vector<std::string> names_;
};

const ReplayProgress kQuiet = [](const char*, int32_t, int32_t) {};

// ---- entropy ----

TEST(EntropyPages, ThresholdsAreThoseOfTheReference) {
  TraceFile file = SmallTrace(38, 128, 0, {0});  // 38 = 32 + 6: the first whole page begins at 26
  file.Overwrite("entropy", Series(128, 7));
  Traces traces;
  traces.Add(file);
  const EntropyPages pages = MeasureEntropyPages(traces.all());
  EXPECT_EQ(pages.status, "ok");
  EXPECT_EQ(pages.means.size(), 3u);
  EXPECT_NEAR(pages.thresholds[0], 3.7831981499586256, 1e-9);
  EXPECT_NEAR(pages.thresholds[1], 9.887209303017839, 1e-9);
  EXPECT_NEAR(pages.share_over, 1.0 / 3, 1e-12);  // 3.79 and 9.91
  EXPECT_NEAR(pages.means.Percentile(0), 2.647499998973217, 1e-9);
}

TEST(EntropyPages, PagesOfAllTracesCount) {
  Traces traces;
  traces.Add(SmallTrace(32, 70, 0, {0}));
  traces.Add(SmallTrace(31, 33, 0, {0}));
  const EntropyPages pages = MeasureEntropyPages(traces.all());
  EXPECT_EQ(pages.means.size(), 3u);
  EXPECT_EQ(pages.thresholds[0], 1);  // every entropy is 1
  EXPECT_EQ(pages.thresholds[1], 0);
  EXPECT_EQ(pages.share_over, 0);  // equal is not over
}

TEST(EntropyPages, SaysWhatIsMissing) {
  TraceFile none = SmallTrace(40, 64, 0, {0});
  none.Hide("entropy");
  Traces without, brief;
  without.Add(none);
  brief.Add(SmallTrace(40, 40, 0, {0}));  // generated tokens 40 .. 79: no whole page
  EXPECT_EQ(MeasureEntropyPages(without.all()).status, "not in the trace: entropy");
  EXPECT_THAT(MeasureEntropyPages(brief.all()).status, HasSubstr("too short"));
}

// ---- surprisal ----

TEST(SpanShares, SharesAreThoseOfTheReference) {
  TraceFile file = SmallTrace(2000, 5, 0, {0});
  file.Overwrite("surprisal", Series(2000, 1));
  Traces traces;
  traces.Add(file);
  const SpanShares shares = MeasureSpanShares(traces.all());
  ASSERT_EQ(shares.alphas.size(), 6u);
  const double anchors[] = {0.312, 0.2155, 0.116, 0.0345, 0.0005, 0.0005};
  const double persistent[] = {0.6475, 0.4705, 0.2485, 0.073, 0.001, 0.001};
  const int64_t spans[] = {136, 169, 145, 58, 1, 1};
  const int64_t short_spans[] = {108, 115, 60, 11, 0, 0}, longer[] = {26, 45, 54, 14, 0, 0};
  const int64_t rows[] = {1484, 1225, 887, 624, 519, 519};
  for (size_t i = 0; i < 6; ++i) {
    const AlphaShare& a = shares.alphas[i];
    EXPECT_EQ(a.alpha, 0.5 + 0.5 * static_cast<double>(i));
    EXPECT_DOUBLE_EQ(a.anchor_share, anchors[i]);
    EXPECT_DOUBLE_EQ(a.persistent_share, persistent[i]);
    EXPECT_EQ(a.spans, spans[i]);
    EXPECT_EQ(a.lengths[0].spans, short_spans[i]);
    EXPECT_EQ(a.lengths[1].spans, longer[i]);
    EXPECT_EQ(a.budget_rows, rows[i]);
    EXPECT_DOUBLE_EQ(a.budget_share, static_cast<double>(rows[i]) / 2005);
  }
  EXPECT_EQ(shares.alphas[5].lengths.back().spans, 1);  // 1999 tokens are one
  EXPECT_EQ(shares.alphas[5].lengths.back().tokens, 1999);
}

TEST(SpanShares, CutsByHand) {
  // Threshold 1.75 + 2.88 at alpha 1: anchors 0, 5 and 9.
  const std::vector<float> h = {0, 1, 1, 1, 1, 9, 1, 1, 1, 9, 1, 1};
  const Spans spans = CutSpans(h, 1, 4, 0);
  EXPECT_EQ(spans.anchors, 3);
  EXPECT_THAT(spans.spans, ElementsAre(std::array<int32_t, 2>{1, 5}));
  EXPECT_THAT(CutSpans(h, 1, 3, 0).spans,
              ElementsAre(std::array<int32_t, 2>{1, 5}, std::array<int32_t, 2>{6, 9}));
  // The window begins at 8, before the last anchor, and cuts the second span.
  EXPECT_THAT(CutSpans(h, 1, 2, 4).spans,
              ElementsAre(std::array<int32_t, 2>{1, 5}, std::array<int32_t, 2>{6, 8}));
  EXPECT_TRUE(CutSpans(h, 1, 2, 100).spans.empty());
  // Equal surprisals give no anchor but the first.
  EXPECT_EQ(CutSpans(std::vector<float>(20, 1.0f), 0.5, 4, 0).anchors, 1);
}

TEST(SpanShares, SaysWhatIsMissing) {
  TraceFile file = SmallTrace(40, 2, 0, {0});
  file.Hide("surprisal");
  Traces traces;
  traces.Add(file);
  EXPECT_EQ(MeasureSpanShares(traces.all()).status, "not in the trace: surprisal");
  traces.Add(SmallTrace(50, 2, 0, {0}));  // one that has them is enough
  EXPECT_EQ(MeasureSpanShares(traces.all()).status, "ok");
  EXPECT_EQ(MeasureSpanShares(traces.all()).tokens, 50);
}

// ---- queries ----

constexpr double kTurn = 0.21;  // radians that head 0 turns a step; head 1 stays

TraceFile Turning(int steps, int tail) {
  TraceFile file = SmallTrace(40, steps, tail, {2});
  std::vector<uint16_t> q(static_cast<size_t>((tail + steps) * 128));
  for (int t = -tail; t < steps; ++t) {
    uint16_t* row = q.data() + (tail + t) * 128;
    row[3] = ToBf16(static_cast<float>(std::cos(kTurn * t)));
    row[9] = ToBf16(static_cast<float>(std::sin(kTurn * t)));
    row[64 + 5] = ToBf16(t < 0 ? -1.0f : 1.0f);  // the prompt's queries do not count
  }
  file.Overwrite("q.2", q);
  return file;
}

TEST(QueryCosines, OfTurningHeads) {
  Traces traces;
  traces.Add(Turning(8, 4));
  const QueryCosines cosines = MeasureQueryCosines(traces.all());
  ASSERT_EQ(cosines.layers.size(), 1u);
  EXPECT_EQ(cosines.layers[0].layer, 2);
  EXPECT_EQ(cosines.layers[0].flattened.size(), 7u);
  EXPECT_NEAR(cosines.layers[0].flattened.Mean(), (std::cos(kTurn) + 1) / 2, 2e-3);
  EXPECT_NEAR(cosines.layers[0].smallest.Percentile(50), std::cos(kTurn), 2e-3);
  // k steps after a selection the cosine is (cos(0.21 k) + 1) / 2, per head cos(0.21 k).
  ASSERT_EQ(cosines.hit_rates.size(), 4u);
  const double flat[] = {6, 6, 6, 5}, per_head[] = {6, 5, 5, 4};  // hits among 8 steps
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(cosines.hit_rates[i].flattened, flat[i] / 8) << kThetas[i];
    EXPECT_DOUBLE_EQ(cosines.hit_rates[i].per_head, per_head[i] / 8) << kThetas[i];
  }
}

TEST(QueryCosines, TracesAndLayersAddUp) {
  Traces traces;
  traces.Add(Turning(8, 4));
  traces.Add(Turning(4, 0));  // 0.9: three hits of four
  const QueryCosines cosines = MeasureQueryCosines(traces.all());
  EXPECT_EQ(cosines.steps, 12);
  EXPECT_EQ(cosines.layers[0].flattened.size(), 10u);
  EXPECT_DOUBLE_EQ(cosines.hit_rates[2].flattened, 9.0 / 12);
}

TEST(QueryCosines, OneStepHasNoPair) {
  Traces traces;
  traces.Add(Turning(1, 4));
  EXPECT_THAT(MeasureQueryCosines(traces.all()).status, HasSubstr("not in the trace"));
}

// ---- break-even ----

BreakEvenPoint Point(int32_t tokens, double ratio, bool sparse = true) {
  return {tokens, 2.0, 2.0 * ratio, sparse};
}

TEST(BreakEven, IsInterpolated) {
  EXPECT_DOUBLE_EQ(*BreakEvenLength({Point(512, 1.5), Point(1024, 1.2), Point(2048, 0.8)}), 1536);
  // A dip below one that does not last is noise.
  EXPECT_DOUBLE_EQ(
      *BreakEvenLength({Point(512, 0.9), Point(1024, 1.25), Point(2048, 0.75), Point(4096, 0.5)}),
      1536);
}

TEST(BreakEven, WithoutASlowerSparsePointItIsTheFirstFasterOne) {
  EXPECT_EQ(*BreakEvenLength({Point(512, 0.9), Point(1024, 0.5)}), 512);
  // Below 2048 the plan attended in full: 0.99 there says nothing.
  EXPECT_EQ(*BreakEvenLength({Point(1024, 0.99, false), Point(2048, 0.8)}), 2048);
}

TEST(BreakEven, MayLieBeyondTheTrace) {
  EXPECT_FALSE(BreakEvenLength({Point(512, 0.9), Point(1024, 1.0)}).has_value());
  EXPECT_FALSE(BreakEvenLength({Point(512, 0.9, false)}).has_value());
  EXPECT_FALSE(BreakEvenLength({}).has_value());
}

TEST(BreakEven, Lengths) {
  EXPECT_THAT(BreakEvenLengths(100), ElementsAre(100));
  EXPECT_THAT(BreakEvenLengths(512), ElementsAre(512));
  EXPECT_THAT(BreakEvenLengths(4096), ElementsAre(512, 1024, 2048, 4096));
  EXPECT_THAT(BreakEvenLengths(5000), ElementsAre(512, 1024, 2048, 4096, 5000));
}

// ---- everything ----

class CalibrateTest : public testing::Test {
 protected:
  CalibrateTest() { fake_library = {}; }
  ~CalibrateTest() override { fake_library = {}; }

  void AddTrace(int prompt = 1030, int steps = 34) {
    traces_.Add(SmallTrace(prompt, steps, 8, {0, 1, 3}));
  }
  Calibration Run(const CalibrateOptions& options = {}) const {
    auto result = Calibrate(traces_.all(), traces_.names(), options, kQuiet);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    return result.ok() ? std::move(result).value() : Calibration{};
  }
  Status Refused(TraceFile other) {
    traces_ = {};
    AddTrace();
    traces_.Add(other);
    return Calibrate(traces_.all(), traces_.names(), {}, kQuiet).status();
  }

  Traces traces_;
};

TEST_F(CalibrateTest, AsksTheDaemonAboutEveryPlan) {
  AddTrace(40, 2);
  AddTrace();
  fake_library.losses = {0.4f, 0.2f, 0.1f, 0.05f, 0.6f, 0.3f, 0.2f, 0.15f};
  const Calibration c = Run();
  EXPECT_EQ(c.packing.status, "ok");
  // The fake's strategies (16, 1, 8) twice and (24, 2, 16) once, for each trace.
  ASSERT_EQ(c.packing.strategies.size(), 2u);
  EXPECT_THAT(c.packing.strategies[0].strategy, ElementsAre(16, 1, 8));
  EXPECT_EQ(c.packing.strategies[0].count, 4);
  EXPECT_EQ(c.packing.strategies[1].count, 2);
  ASSERT_EQ(c.packing.losses.size(), 4u);
  EXPECT_EQ(c.packing.losses[1].keep, 16);
  EXPECT_EQ(c.packing.losses[1].loss.size(), 4u);
  EXPECT_NEAR(c.packing.losses[1].loss.Mean(), 0.25, 1e-6);
  EXPECT_EQ(c.break_even.trace, 1u);
  EXPECT_EQ(c.break_even.steps, 32);
  ASSERT_EQ(c.break_even.plans.size(), 3u);
  for (const BreakEvenPlan& plan : c.break_even.plans) {
    ASSERT_EQ(plan.points.size(), 3u) << plan.plan;  // 512, 1024, 1030
    EXPECT_EQ(plan.points[2].tokens, 1030);
    EXPECT_TRUE(plan.points[0].sparse);
    EXPECT_GT(plan.points[0].full_ms, 0);
  }
  EXPECT_THAT(fake_library.opened,
              Contains("mosaickv{strategy = \"search\", max_loss = 1, min_tokens = 0}"));
  EXPECT_THAT(fake_library.opened, Contains("tokenselect{min_tokens = 0}"));
  EXPECT_THAT(fake_library.prompt_tokens, Contains(512u));
}

TEST_F(CalibrateTest, ADaemonWithoutLossesOrAPlanLeavesThemOut) {
  AddTrace();
  fake_library.refused_plan = "tokenselect";
  const Calibration c = Run();
  EXPECT_THAT(c.packing.losses_status, HasSubstr("does not report them"));
  EXPECT_TRUE(c.packing.losses.empty());
  EXPECT_EQ(c.packing.status, "ok");
  EXPECT_THAT(c.break_even.plans[2].status, HasSubstr("PLAN_UNIMPLEMENTED"));
  EXPECT_FALSE(c.break_even.plans[2].tokens.has_value());
  EXPECT_EQ(c.break_even.plans[1].status, "ok");
  fake_library.refused_plan = "mosaickv";
  EXPECT_THAT(Run().packing.status, HasSubstr("PLAN_UNIMPLEMENTED"));
}

TEST_F(CalibrateTest, OfflineAsksNobody) {
  AddTrace();
  const Calibration c = Run({.offline = true});
  EXPECT_TRUE(fake_library.opened.empty());
  EXPECT_THAT(c.break_even.status, HasSubstr("--offline"));
  EXPECT_EQ(c.entropy.status, "too short: no page of 32 generated tokens");
  EXPECT_EQ(c.cosines.status, "ok");
}

TEST_F(CalibrateTest, NoStepsNoBreakEven) {
  AddTrace(100, 0);
  EXPECT_EQ(Run().break_even.status, "not in the trace: decode steps");
}

TEST_F(CalibrateTest, TracesOfDifferentModelsAreRefusedWithTheField) {
  TraceFile same = SmallTrace(64, 2, 0, {1});  // other layers of the model
  same.metadata["source"] = "another text";
  EXPECT_TRUE(Refused(same).ok());
  TraceFile named = SmallTrace(64, 2, 0, {0});
  named.metadata["model"] = "other";
  const Status status = Refused(named);
  EXPECT_EQ(status.reason(), "CALIBRATE_MODELS");
  EXPECT_THAT(status.message(), HasSubstr("model is 'random' and 'other'"));
  EXPECT_THAT(status.message(), HasSubstr("'t1'"));
  TraceFile deeper = SmallTrace(64, 2, 0, {0});
  deeper.metadata["layers"] = "5";
  EXPECT_THAT(Refused(deeper).message(), HasSubstr("layers is '4' and '5'"));
  TraceFile unnamed = SmallTrace(64, 2, 0, {0});
  unnamed.metadata.erase("model");
  EXPECT_TRUE(Refused(unnamed).ok());
}

TEST_F(CalibrateTest, KeysBeforeRotaryEmbeddingAreRefused) {
  TraceFile file = SmallTrace(64, 2, 0, {1});
  file.metadata["keys"] = "pre_rope";
  file.metadata["rope_theta"] = "10000";
  file.metadata["rope_dim"] = "64";
  traces_.Add(file);
  const Status status = Calibrate(traces_.all(), traces_.names(), {}, kQuiet).status();
  EXPECT_EQ(status.reason(), "CALIBRATE_PRE_ROPE");
  EXPECT_THAT(status.message(), HasSubstr("'pre_rope'; allowed: post_rope"));
}

// ---- plans ----

Calibration Numbers() {
  Calibration c;
  c.entropy.means.Add(1);
  c.entropy.thresholds = {2.0, 0.75};
  c.spans.alphas = {{.alpha = 1, .budget_rows = 400, .budget_share = 0.4},
                    {.alpha = 2, .budget_rows = 120, .budget_share = 0.12},
                    {.alpha = 3, .budget_rows = 50, .budget_share = 0.05}};
  c.cosines.hit_rates = {{0.8, 0.9, 0.5}, {0.85, 0.7, 0.4}, {0.9, 0.5, 0.2}, {0.95, 0.1, 0}};
  c.packing.losses = {{8, {}}, {16, {}}};
  c.packing.losses[1].loss.Add(0.12);
  c.break_even.plans = {{"quest", "", "ok", {Point(2048, 0.5)}, 1500.0},
                        {"chess", "", "ok", {Point(2048, 1.5)}, {}}};
  return c;
}

std::string TextOf(const std::vector<CalibratedPlan>& plans, const std::string& name) {
  for (const CalibratedPlan& plan : plans) {
    if (plan.name == name) return plan.text;
  }
  return "";
}

TEST(CalibratedPlans, FollowFromTheNumbers) {
  const auto plans = PlansOf(Numbers());
  EXPECT_EQ(TextOf(plans, "chess_calibrated"), "chess{thresholds = [2.0, 0.75]}");
  EXPECT_EQ(TextOf(plans, "sekv_calibrated"), "sekv{alpha = 2.0, rows_share = 0.25}");
  EXPECT_EQ(TextOf(plans, "tokenselect_calibrated"), "tokenselect{theta = 0.9}");
  EXPECT_EQ(TextOf(plans, "quest_calibrated"), "quest{min_tokens = 1536}");
  EXPECT_EQ(TextOf(plans, "mosaickv_calibrated"),
            "mosaickv{strategy = \"search\", max_channel_loss = 0.121}");
  EXPECT_EQ(plans.size(), 5u);
}

TEST(CalibratedPlans, WithoutRoomForSpansTheBudgetGrows) {
  Calibration c = Numbers();
  c.spans.alphas.resize(1);
  EXPECT_EQ(TextOf(PlansOf(c), "sekv_calibrated"), "sekv{alpha = 1.0, rows_share = 0.8}");
  c.packing.losses.clear();
  c.packing.strategies = {{{32, 1, 8}, 5}, {{16, 2, 4}, 1}};
  EXPECT_EQ(TextOf(PlansOf(c), "mosaickv_calibrated"),
            "mosaickv{keep = 32, neighbours = 1, block = 8}");
}

TEST(CalibratedPlans, NothingKnownNothingWritten) {
  Calibration c;
  c.entropy.status = c.spans.status = c.cosines.status = "not in the trace: x";
  EXPECT_TRUE(PlansOf(c).empty());
  EXPECT_EQ(ToToml({}, {"a\nb"}), "# a\\x0ab\n\n[plans]\n");
}

TEST(CalibratedPlans, TomlSaysWhereNumbersComeFrom) {
  const std::string toml = ToToml(PlansOf(Numbers()), {"from t"});
  EXPECT_THAT(toml, HasSubstr("# from t\n\n[plans]\n"));
  EXPECT_THAT(toml, HasSubstr("\nchess_calibrated = 'chess{thresholds = [2.0, 0.75]}'\n"));
  EXPECT_THAT(toml, HasSubstr("# thresholds: 99th percentiles"));
  EXPECT_THAT(toml, HasSubstr("was not faster than full's at 2048 tokens"));
  Calibration full = Numbers();
  full.break_even.plans[1].points = {Point(2048, 1.0, false)};
  EXPECT_THAT(ToToml(PlansOf(full), {}), HasSubstr("the plan attends in full at 2048 tokens"));
  std::istringstream lines(toml);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(line.empty() || line[0] == '#' || line == "[plans]" || line.ends_with("}'"))
        << line;
  }
}

// ---- document ----

TEST_F(CalibrateTest, DocumentAndTables) {
  AddTrace();
  fake_library.refused_plan = "tokenselect";
  const Calibration c = Run();
  const Json document =
      CalibrationDocument(traces_.all(), traces_.names(), c, PlansOf(c), "x.toml");
  EXPECT_EQ(document["traces"][0]["prompt_tokens"], 1030);
  EXPECT_TRUE(document["chess"]["thresholds"].is_null());
  EXPECT_TRUE(document["chess"]["mean"]["p99"].is_null());
  EXPECT_EQ(document["sekv"]["alphas"].size(), 6u);
  EXPECT_EQ(document["tokenselect"]["cosine"][2]["layer"], 3);
  EXPECT_EQ(document["mosaickv"]["strategies"][0]["keep"], 16);
  EXPECT_EQ(document["break_even"]["trace"], "t0");
  EXPECT_EQ(document["break_even"]["plans"][0]["points"][0]["tokens"], 512);
  std::ostringstream table, bare;
  PrintCalibration({}, document, table);
  EXPECT_THAT(table.str(), HasSubstr("generated tokens: too short"));
  EXPECT_THAT(table.str(), HasSubstr("no loss curve: the daemon does not report them"));
  EXPECT_THAT(table.str(), HasSubstr("PLAN_UNIMPLEMENTED"));
  EXPECT_THAT(table.str(), HasSubstr("written to x.toml"));
  PrintCalibration({.headers = false}, document, bare);
  EXPECT_THAT(bare.str(), Not(HasSubstr("ALPHA")));
  EXPECT_THAT(bare.str(), HasSubstr("sekv_calibrated"));
}

}  // namespace
}  // namespace kvstrata::cli
