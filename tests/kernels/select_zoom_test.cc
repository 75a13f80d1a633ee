// SPDX-License-Identifier: Apache-2.0
// Selectors over codec `lowrank` against docs/spec/sekv.md 6 and 7 in double precision: `zoom`, and
// `bucket` on spans.
#include "gmock/gmock.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/select_fixture.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 71;

Geometry SmallGeometry() { return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64}; }

// Surprisal with a high value every few tokens: spans of 1 to 20 tokens.
std::vector<float> Surprisal(int32_t n) {
  std::mt19937_64 random(kSeed);
  std::vector<float> surprisal(n);
  for (int32_t t = 0; t < n; ++t) {
    surprisal[t] = random() % 9 == 0 ? 9.0f : 0.01f * static_cast<float>(random() % 100);
  }
  return surprisal;
}

std::shared_ptr<SpanParameters> Trained(const Geometry& g, const Plan& plan, float tau) {
  auto p = std::make_shared<SpanParameters>();
  p->layers = g.layers, p->query_heads = g.query_heads, p->head_dim = g.head_dim;
  p->d_route = plan.lowrank.d_route, p->r_max = plan.lowrank.r_max;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal(0, 0.2f);
  const auto fill = [&](size_t n, std::vector<float>* out) {
    out->resize(n);
    for (float& x : *out) x = normal(random);
  };
  fill(size_t(g.layers) * g.query_heads * p->d_route * g.head_dim, &p->w);
  p->tau.assign(size_t(g.layers) * g.query_heads, tau);
  const int in = p->r_max + g.head_dim;
  const int sizes[] = {in, 64, 64, p->r_max};
  for (int i = 0; i < 3; ++i) {
    fill(size_t(sizes[i]) * sizes[i + 1], &p->weight[i]);
    fill(sizes[i + 1], &p->bias[i]);
  }
  return p;
}

// What training begins with: W is 1, relevance is not divided by |W k_mean|, no threshold.
std::shared_ptr<SpanParameters> Begun(const Geometry& g, Plan plan) {
  plan.lowrank.d_route = g.head_dim;
  auto p = Trained(g, plan, 0);
  const size_t square = size_t(g.head_dim) * g.head_dim;
  for (size_t i = 0; i < p->w.size(); ++i)
    p->w[i] = i % square % (g.head_dim + 1) == 0 ? 1.0f : 0.0f;
  p->norm.assign(p->tau.size(), 1.0f);
  return p;
}

class SpanRun {
 public:
  SpanRun(const Inputs& in, const std::string& text, const std::string& backend, float tau = -1)
      : SpanRun(in, text, backend, tau < 0 ? nullptr : Trained(in.g, PlanOf(text), tau)) {}
  SpanRun(const Inputs& in, const std::string& text, const std::string& backend,
          std::shared_ptr<SpanParameters> parameters)
      : plan(PlanOf(text)),
        sequence(plan, in.g, in, std::move(parameters), backend),
        selector(NewSelector(plan, in.g)),
        in_(in) {}

  void Prompt(int32_t n, bool surprisal = true) {
    sequence.Commit(n);
    if (surprisal) sequence.Report(Surprisal(n));
    sequence.PrefillDone();
    Parse();
    if (selector->history() != nullptr) selector->history()->PrefillDone(Context());
  }
  void Parse() {
    sequence.Settle();
    const SequenceView view = sequence.View();
    if (view.extent_count == 0) return;
    Result<std::unique_ptr<SpanStorage>> parsed = SpanStorage::Parse(view, sequence.geometry());
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    spans = std::move(*parsed);
  }
  SelectContext Context() {
    SelectContext c = sequence.Context(spans.get());
    c.boundary = boundary;
    return c;
  }
  Selection Select(int layer) {
    Selection s;
    selector->Select(Context(), layer, in_.Query(sequence.tokens(), layer, 0), &s);
    return s;
  }

  Plan plan;
  CodecSequence sequence;
  std::unique_ptr<Selector> selector;
  std::unique_ptr<SpanStorage> spans;
  std::vector<uint8_t> boundary;

 private:
  const Inputs& in_;
};

Doubles KeyMean(const SpanStorage& spans, int32_t span, int layer, int head) {
  size_t part = 0;
  while (span >= spans.parts()[part].first_span + spans.parts()[part].span_count) ++part;
  const PagedRows rows = spans.KeyMeans(static_cast<int>(part), layer, head);
  const auto* row = reinterpret_cast<const BF16*>(rows.Row(span - spans.parts()[part].first_span));
  Doubles mean(64);
  for (int c = 0; c < 64; ++c) mean[c] = ToFloat(row[c]);
  return mean;
}

Doubles RelevanceLogits(const SpanStorage& spans, const Inputs& in, int32_t query, int layer,
                        int h) {
  Doubles logits;
  for (size_t s = 0; !spans.trained() && s < spans.spans().size(); ++s) {
    const Doubles mean = KeyMean(spans, static_cast<int32_t>(s), layer, h / in.g.group());
    const double dot = std::inner_product(mean.begin(), mean.end(), in.Query(query, layer, h), 0.0);
    const kvstrata::Run tokens = spans.spans()[s];
    logits.push_back(dot / std::sqrt(64.0) + std::log(tokens.end - tokens.begin));
  }
  if (!spans.trained()) return logits;
  const float* w = spans.Router(layer, h);
  const int routes = spans.d_route();
  Doubles routed(routes);
  for (int r = 0; r < routes; ++r) routed[r] = Dot(w + r * 64, in.Query(query, layer, h), 64);
  for (size_t s = 0; s < spans.spans().size(); ++s) {
    const Doubles mean = KeyMean(spans, static_cast<int32_t>(s), layer, h / in.g.group());
    double dot = 0, norm = 0;
    for (int r = 0; r < routes; ++r) {
      const double k = std::inner_product(mean.begin(), mean.end(), w + r * 64, 0.0);
      dot += routed[r] * k;
      norm += k * k;
    }
    const kvstrata::Run tokens = spans.spans()[s];
    logits.push_back((norm > 0 ? dot / std::sqrt(norm) : 0) / std::sqrt(routes) +
                     std::log(tokens.end - tokens.begin));
  }
  return logits;
}

// Spans to expand, ascending; *stable: no decision hangs on fp32 noise.
Ints Expanded(const SpanStorage& spans, const Doubles& logits, double threshold, int64_t room,
              bool* stable) {
  Ints chosen;
  double last = INFINITY;
  *stable = true;
  for (const int32_t s : Ranking(logits)) {
    if (last - logits[s] < 1e-4 || std::abs(logits[s] - threshold) < 1e-4) *stable = false;
    last = logits[s];
    const int32_t more = spans.spans()[s].end - spans.spans()[s].begin - 1;
    if (logits[s] <= threshold) break;
    if (more > room) continue;
    chosen.push_back(s);
    room -= more;
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Positions in no span, up to n.
Ints RawRows(const SpanStorage& spans, int32_t n) {
  Ints rows;
  for (int32_t t = 0; t < n; ++t) {
    bool in_span = false;
    for (const kvstrata::Run& s : spans.spans()) in_span |= s.begin <= t && t < s.end;
    if (!in_span) rows.push_back(t);
  }
  return rows;
}

Ints CoarseSpans(const std::vector<CoarseRun>& rows) {
  Ints spans;
  for (const CoarseRun& r : rows) {
    EXPECT_EQ(r.level, 0);
    for (int32_t s = r.units.begin; s < r.units.end; ++s) spans.push_back(s);
  }
  return spans;
}

struct ZoomCase {
  const char* budget;
  float tau;  // < 0: untrained
};

class Zoom : public EachBackend {};

constexpr const char* kCommon =
    "alpha = 1, l_min = 1, r_max = 8, d_route = 16, local = 32, min_tokens = 0";

TEST_P(Zoom, ExpandsByRelevanceWithinTheBudget) {
  const Inputs in(SmallGeometry(), 420, kSeed);
  const ZoomCase cases[] = {
      {"rows = 0", 0.9f},          {"rows = 0", 0.05f}, {"rows = 190", 0.05f},
      {"rows = 200", -1},          {"rows = 0", -1},    {"rows_share = 0.55", -1},
      {"rows_share = 0.01", 0.5f}, {"rows = 180", -1},  {"rows_share = 0.5", 0.01f}};
  int skipped = 0, counted = 0, expanded = 0;
  for (const ZoomCase& c : cases) {
    SpanRun run(in, std::string("sekv{") + kCommon + ", " + c.budget + "}", GetParam(), c.tau);
    ASSERT_NO_FATAL_FAILURE(run.Prompt(360));
    ASSERT_TRUE(run.spans);
    const auto all = static_cast<int32_t>(run.spans->spans().size());
    ASSERT_GT(all, 20);
    for (int32_t n = 361; n <= in.n; n += 3) {
      run.sequence.Commit(n - 1);
      const Ints raw = RawRows(*run.spans, n);
      int64_t budget = run.plan.zoom.rows;
      if (budget < 0) budget = std::ceil(run.plan.zoom.rows_share * n - 1e-9);
      const int64_t persistent = static_cast<int64_t>(raw.size()) + all;
      const int64_t room = budget == 0 ? INT32_MAX : std::max<int64_t>(budget - persistent, 0);
      const double threshold = c.tau < 0 ? -INFINITY : std::log(c.tau / (1 - c.tau));
      for (int layer = 0; layer < 2; ++layer) {
        const Selection got = run.Select(layer);
        ASSERT_FALSE(got.full);
        ASSERT_EQ(got.groups(), 1);
        ASSERT_EQ(PositionsOf(got.runs[0]), raw) << c.budget << " n " << n;
        ASSERT_EQ(got.units.size(), 4u);
        ASSERT_EQ(got.coarse.size(), 4u);
        for (int h = 0; h < 4; ++h) {
          const Doubles logits = RelevanceLogits(*run.spans, in, n - 1, layer, h);
          bool stable = true;
          const Ints units = Expanded(*run.spans, logits, threshold, room, &stable);
          ++counted;
          const Ints coarse = CoarseSpans(got.coarse[h]);
          ASSERT_EQ(UnionOf(got.units[h], coarse), Upto(0, all));
          ASSERT_EQ(got.units[h].size() + coarse.size(), static_cast<size_t>(all));
          expanded += static_cast<int>(units.size());
          if (!stable) {
            ++skipped;
            continue;
          }
          ASSERT_EQ(got.units[h], units)
              << c.budget << " tau " << c.tau << " seed " << kSeed << " n " << n << " head " << h;
        }
      }
    }
  }
  EXPECT_GT(expanded, 1000);
  EXPECT_LT(skipped, counted / 10);
}

TEST_P(Zoom, ANormTakesThePlaceOfItsRoutersLength) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  const std::string text = std::string("sekv{") + kCommon + ", rows = 0}";
  const auto logits_of = [&](const std::shared_ptr<SpanParameters>& parameters) {
    SpanRun run(in, text, GetParam(), parameters);
    run.Prompt(280);
    run.Select(0);
    run.Select(1);
    EXPECT_EQ(run.spans->trained(), parameters != nullptr);
    return *run.selector->Inspect(run.Context(), "relevance_logits");
  };
  const auto floats = [](const InspectArray& array) {
    std::vector<float> all(array.bytes.size() / sizeof(float));
    std::memcpy(all.data(), array.bytes.data(), array.bytes.size());
    return all;
  };
  const std::vector<float> untrained = floats(logits_of(nullptr));
  const std::vector<float> begun = floats(logits_of(Begun(in.g, PlanOf(text))));
  ASSERT_EQ(begun.size(), untrained.size());
  for (size_t i = 0; i < begun.size(); ++i) ASSERT_NEAR(begun[i], untrained[i], 1e-4) << i;
}

// The one row that is left goes to a pair of tokens, however many longer spans come before it.
TEST_P(Zoom, WhatDoesNotFitIsPassedOver) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  const auto run_of = [&](int64_t rows) {
    const std::string budget = ", rows = " + std::to_string(rows) + "}";
    auto run =
        std::make_unique<SpanRun>(in, std::string("sekv{") + kCommon + budget, GetParam(), -1.0f);
    run->Prompt(280);
    return run;
  };
  const auto first = run_of(0);
  const auto& spans = first->spans->spans();
  const auto persistent = static_cast<int64_t>(RawRows(*first->spans, 281).size() + spans.size());
  const auto run = run_of(persistent + 1);
  const Selection got = run->Select(0);
  ASSERT_FALSE(got.full);
  for (int h = 0; h < 4; ++h) {
    const Doubles logits = RelevanceLogits(*run->spans, in, 280, 0, h);
    Ints pairs;
    for (const int32_t s : got.units[h]) {
      if (spans[s].end - spans[s].begin == 2) pairs.push_back(s);
    }
    ASSERT_EQ(pairs.size(), 1u) << "head " << h;
    for (size_t s = 0; s < spans.size(); ++s) {
      if (spans[s].end - spans[s].begin != 2 || static_cast<int32_t>(s) == pairs[0]) continue;
      EXPECT_LT(logits[s], logits[pairs[0]] + 1e-4) << "head " << h << " span " << s;
    }
  }
}

TEST_P(Zoom, LogitsCanBeInspected) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  SpanRun run(in, std::string("sekv{") + kCommon + ", rows = 0}", GetParam(), 0.3f);
  ASSERT_NO_FATAL_FAILURE(run.Prompt(280));
  run.Select(0);
  run.Select(1);
  const Result<InspectArray> array = run.selector->Inspect(run.Context(), "relevance_logits");
  ASSERT_TRUE(array.ok()) << array.status().ToString();
  const auto all = static_cast<int64_t>(run.spans->spans().size());
  EXPECT_EQ(array->shape, (std::vector<int64_t>{2, 4, all}));
  std::vector<float> got(array->bytes.size() / sizeof(float));
  std::memcpy(got.data(), array->bytes.data(), array->bytes.size());
  for (int i = 0; i < 8; ++i) {
    const Doubles expected = RelevanceLogits(*run.spans, in, 280, i / 4, i % 4);
    for (int64_t s = 0; s < all; ++s) ASSERT_NEAR(got[i * all + s], expected[s], 1e-4);
  }
  EXPECT_EQ(run.selector->Inspect(run.Context(), "nothing").status().reason(), "INSPECT_UNKNOWN");
}

TEST_P(Zoom, ABudgetBelowThePersistentRowsIsSaidAndReplaced) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  SpanRun run(in, std::string("sekv{") + kCommon + ", rows = 20}", GetParam(), 0.3f);
  ASSERT_NO_FATAL_FAILURE(run.Prompt(280));
  const Selection got = run.Select(0);
  ASSERT_FALSE(got.full);
  const int64_t persistent = static_cast<int64_t>(RawRows(*run.spans, 280).size()) +
                             static_cast<int64_t>(run.spans->spans().size());
  EXPECT_THAT(run.selector->StatusText(run.Context()),
              HasSubstr("smallest budget now is rows = " + std::to_string(persistent)));
  for (const Ints& units : got.units) {
    for (const int32_t s : units) {  // only what costs nothing
      EXPECT_EQ(run.spans->spans()[s].end - run.spans->spans()[s].begin, 1);
    }
  }
}

TEST_P(Zoom, IsFullWithoutSpansAndSaysWhatIsMissing) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  SpanRun silent(in, std::string("sekv{") + kCommon + ", rows = 0}", GetParam());
  ASSERT_NO_FATAL_FAILURE(silent.Prompt(280, false));
  EXPECT_TRUE(silent.Select(0).full);
  EXPECT_THAT(silent.selector->StatusText(silent.Context()), HasSubstr("surprisal"));
  SpanRun untrained(in, std::string("sekv{") + kCommon + ", rows = 0}", GetParam());
  ASSERT_NO_FATAL_FAILURE(untrained.Prompt(280));
  EXPECT_FALSE(untrained.Select(0).full);
  EXPECT_THAT(untrained.selector->StatusText(untrained.Context()), HasSubstr("no trained"));
  SpanRun large(in, std::string("sekv{") + kCommon + ", rows = 290}", GetParam());
  ASSERT_NO_FATAL_FAILURE(large.Prompt(280));
  EXPECT_TRUE(large.Select(0).full);
}

// --- bucket on spans ---

TEST_P(Zoom, BucketsOfSpansFollowTheSentence) {
  const Inputs in(SmallGeometry(), 420, kSeed);
  for (const bool per_head : {false, true}) {
    SpanRun run(in,
                std::string("sentencekv{codec = 'lowrank', tau = 40, max_length = 9, alpha = 1, "
                            "l_min = 2, r_max = 8, d_route = 16, local = 32, min_tokens = 0") +
                    (per_head ? ", per_query_head = true}" : "}"),
                GetParam());
    run.boundary.resize(in.n);
    for (int32_t t = 360; t < in.n; ++t) run.boundary[t] = t % 7 == 0;
    ASSERT_NO_FATAL_FAILURE(run.Prompt(360));
    ASSERT_TRUE(run.spans);
    const int rows = per_head ? 4 : 2, group = 4 / rows;
    Ints queries;
    int skipped = 0;
    for (int32_t n = 361; n <= in.n; ++n) {
      queries.push_back(n - 1);
      run.selector->history()->Begin(run.Context());
      run.Select(1);
      const Selection got = run.Select(1);  // selecting twice is selecting once
      ASSERT_EQ(PositionsOf(got.runs[0]), RawRows(*run.spans, n));
      ASSERT_EQ(got.units.size(), size_t(rows));
      ASSERT_TRUE(got.coarse.empty());
      for (int row = 0; row < rows; ++row) {
        Doubles q(64, 0.0), scores;
        for (const int32_t t : queries) {
          for (int h = row * group; h < (row + 1) * group; ++h) {
            for (int c = 0; c < 64; ++c)
              q[c] += in.Query(t, 1, h)[c] / double(queries.size() * group);
          }
        }
        for (size_t s = 0; s < run.spans->spans().size(); ++s) {
          const Doubles mean = KeyMean(*run.spans, static_cast<int32_t>(s), 1, row * group / 2);
          scores.push_back(std::inner_product(q.begin(), q.end(), mean.begin(), 0.0));
        }
        Ints expected;
        int32_t room = 40;
        for (const int32_t s : Ranking(scores)) {
          const int32_t tokens = run.spans->spans()[s].end - run.spans->spans()[s].begin;
          if (tokens > room) break;
          expected.push_back(s);
          room -= tokens;
        }
        std::sort(expected.begin(), expected.end());
        if (!IsStable(scores, static_cast<int32_t>(expected.size())) ||
            !IsStable(scores, static_cast<int32_t>(expected.size()) + 1)) {
          ++skipped;
          continue;
        }
        ASSERT_EQ(got.units[row], expected) << "seed " << kSeed << " n " << n << " row " << row;
      }
      run.selector->history()->Advance(1);
      run.sequence.Commit(n);
      if (run.boundary[n - 1] != 0 || queries.size() == 9) queries.clear();
    }
    EXPECT_LT(skipped, 5);
  }
}

KVS_FOR_EACH_BACKEND(Zoom);

}  // namespace
}  // namespace kvstrata
