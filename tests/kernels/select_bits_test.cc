// SPDX-License-Identifier: Apache-2.0
// Selector `bits` against docs/spec/bits.md in double precision.
#include "gmock/gmock.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/quantised_keys.h"
#include "tests/kernels/select_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 47;

Geometry SmallGeometry(int32_t kv_heads = 2, int32_t group = 2) {
  return {.layers = 2, .query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 64};
}

// The keys of one (layer, KV head) as scores see them in the step whose token is row n - 1: those
// of groups that were full before it quantised, the others as they are.
std::vector<Doubles> SeenKeys(const Inputs& in, const Plan& p, int32_t n, int layer, int head) {
  std::byte* const first = reinterpret_cast<std::byte*>(const_cast<float*>(in.Key(0, layer, head)));
  const int64_t slot = int64_t{in.g.layers} * in.g.kv_heads * in.g.head_dim * 4;
  const PagedRows keys = {&first, 0, slot, in.n, in.g.head_dim, DType::kF32};
  const QuantisedGroup format = {in.g.head_dim, p.bits.bits, p.index.unit};
  std::vector<std::byte> group(format.bytes());
  std::vector<Doubles> seen;
  for (int32_t t = 0; t < n; ++t) {
    const float* key = in.Key(t, layer, head);
    if (t >= (n - 1) / format.tokens * format.tokens) {
      seen.emplace_back(key, key + in.g.head_dim);
      continue;
    }
    if (t % format.tokens == 0) {
      const QuantiseKeysWork work{keys, t, format, group.data()};
      QuantiseKeysRef(&work, 1, InlineExecutor());
    }
    Doubles& row = seen.emplace_back();
    for (int c = 0; c < in.g.head_dim; ++c) {
      row.push_back(QuantisedAt(format, group.data(), t % format.tokens, c));
    }
  }
  return seen;
}

// Scores of the candidates of one KV head (rule 3).
Doubles Scores(const Inputs& in, const std::vector<Doubles>& seen, int layer, int head,
               kvstrata::Run range) {
  const auto n = static_cast<int32_t>(seen.size());
  Doubles scores(range.end - range.begin, 0.0);
  for (int g = 0; g < in.g.group(); ++g) {
    const float* q = in.Query(n - 1, layer, head * in.g.group() + g);
    Doubles logits;
    for (int32_t t = range.begin; t < range.end; ++t) {
      logits.push_back(in.g.logit_scale() *
                       std::inner_product(seen[t].begin(), seen[t].end(), q, 0.0));
    }
    const Doubles p = Softmax(logits);
    for (size_t t = 0; t < p.size(); ++t) scores[t] += p[t];
  }
  return scores;
}

// What competes: tokens, in whole runs.
kvstrata::Run CandidatesAt(const Plan& p, int32_t n) {
  const int32_t run = p.bits.run;
  const int32_t first = (p.bits.sinks + run - 1) / run * run;
  return {first, std::max((n - p.bits.recent) / run * run, first)};
}

bool InFull(const Plan& p, int32_t n) {
  const kvstrata::Run range = CandidatesAt(p, n);
  return n < p.min_tokens || p.bits.budget / p.bits.run * p.bits.run >= range.end - range.begin;
}

Doubles SumRuns(const Doubles& scores, int32_t run) {
  Doubles sums(scores.size() / run, 0.0);
  for (size_t i = 0; i < scores.size(); ++i) sums[i / run] += scores[i];
  return sums;
}

// Positions that are in one of both only.
size_t Differing(const Ints& a, const Ints& b) {
  Ints differing;
  std::ranges::set_symmetric_difference(a, b, std::back_inserter(differing));
  return differing.size();
}

class Bits : public EachBackend {
 protected:
  // simd rounds queries to 8 bits: a near-tie may go the other way.
  bool exact() const { return GetParam() == "ref"; }

  // Holds a selection to the rules; counts rows that noise of fp32 could turn.
  void ExpectChosen(const Selection& got, const Inputs& in, const Plan& p, int32_t n, int layer,
                    int* skipped) const {
    ASSERT_EQ(got.full, InFull(p, n));
    if (got.full) return;
    ASSERT_EQ(got.groups(), in.g.kv_heads);
    const kvstrata::Run range = CandidatesAt(p, n);
    const int32_t run = p.bits.run, most = p.bits.budget / run;
    for (int head = 0; head < in.g.kv_heads; ++head) {
      const Doubles scores =
          SumRuns(Scores(in, SeenKeys(in, p, n, layer, head), layer, head, range), run);
      Ints chosen;
      for (const int32_t i : TopK(scores, most)) {
        for (int32_t t = i * run; t < (i + 1) * run; ++t) chosen.push_back(range.begin + t);
      }
      const Ints expected = UnionOf(UnionOf(Upto(0, range.begin), chosen), Upto(range.end, n));
      const Ints positions = PositionsOf(got.runs[head]);
      ASSERT_EQ(positions.size(), expected.size()) << "n " << n;
      if (!IsStable(scores, most)) {
        ++*skipped;
        continue;
      }
      if (exact()) {
        ASSERT_EQ(positions, expected) << "seed " << kSeed << " n " << n << " layer " << layer;
      } else {
        ASSERT_LE(Differing(positions, expected), static_cast<size_t>(2 * std::max(run, 2)))
            << "seed " << kSeed << " n " << n << " layer " << layer;
      }
    }
  }
};

constexpr const char* kPlans[] = {
    "budget = 24, recent = 12, unit = 16",
    "budget = 24, sinks = 0, recent = 1, unit = 64",  // many candidates are not sealed
    "budget = 16, sinks = 21, recent = 30, unit = 48, bits = 3",
    "budget = 16, sinks = 70, recent = 5, unit = 64, bits = 4",  // sinks beyond a group
    "budget = 20, recent = 12, unit = 256",                      // nothing is sealed
    "budget = 24, recent = 12, unit = 16, min_tokens = 110",
    "budget = 27, recent = 12, unit = 16, run = 8",
    "budget = 24, sinks = 21, recent = 1, unit = 64, run = 4",  // runs that are not sealed
    "budget = 33, sinks = 0, recent = 30, unit = 48, bits = 3, run = 16",
    "budget = 7, recent = 12, unit = 16, run = 8"};  // a budget below a run

TEST_P(Bits, FollowsTheSpecificationStepByStep) {
  const Inputs in(SmallGeometry(2, 3), 180, kSeed);
  int skipped = 0;
  for (const std::string options : kPlans) {
    SCOPED_TRACE(options);
    const bool min = options.find("min_tokens") != std::string::npos;
    Selecting s(in, "bits{" + options + (min ? "}" : ", min_tokens = 0}"), backend());
    s.Prompt(30);
    s.PrefillDone();
    for (int32_t n = 31; n <= in.n; ++n) {
      const auto got = s.Step();
      for (int layer = 0; layer < 2; ++layer) {
        ASSERT_NO_FATAL_FAILURE(ExpectChosen(got[layer], in, s.plan(), n, layer, &skipped));
      }
    }
  }
  EXPECT_LT(skipped, 20);
}

// More tokens than an index block holds and than a work item scores.
TEST_P(Bits, FollowsItOverManyBlocks) {
  const Inputs in(SmallGeometry(), 4400, kSeed);
  for (const char* plan : {"bits{budget = 64, min_tokens = 0}",
                           "bits{budget = 64, unit = 48, bits = 3, min_tokens = 0}"}) {
    Selecting s(in, plan, backend());
    int skipped = 0;
    s.Prompt(4399, 512);
    s.PrefillDone();
    s.Begin();
    ASSERT_NO_FATAL_FAILURE(ExpectChosen(s.Select(1), in, s.plan(), 4400, 1, &skipped)) << plan;
    EXPECT_LT(skipped, 2);
  }
}

// With max_missed: each candidate's share of all attention of its KV head (rule 3), what quantised
// keys say of it against what the keys themselves say.
struct Shares {
  Doubles estimated, exact;
};

// The variance of a query's logits by the steps of the groups that stand for all.
double NoiseOf(const std::vector<Doubles>& seen, const Inputs& in, const Plan& p, int layer,
               int head, const float* q) {
  const auto n = static_cast<int32_t>(seen.size());
  const int32_t unit = p.index.unit, groups = (n - 1) / unit;
  double sum = 0;
  int32_t count = 0;
  for (int32_t g = groups < 8 ? groups - 1 : 7; g >= 0 && g < groups; g += 8, ++count) {
    for (int c = 0; c < in.g.head_dim; ++c) {
      double low = 1e9, high = -1e9;
      for (int32_t t = g * unit; t < (g + 1) * unit; ++t) {
        const double x = in.Key(t, layer, head)[c];
        low = std::min(low, x), high = std::max(high, x);
      }
      const double step = (high - low) / ((1 << p.bits.bits) - 1);
      sum += std::pow(q[c] * in.g.logit_scale() * step, 2) / 12;
    }
  }
  return count == 0 ? 0 : sum / count;
}

Shares SharesOf(const Inputs& in, const Plan& p, int32_t n, int layer, int head) {
  const std::vector<Doubles> seen = SeenKeys(in, p, n, layer, head);
  const kvstrata::Run range = CandidatesAt(p, n);
  const auto always = [&](int32_t t) { return t < range.begin || t >= range.end; };
  Shares shares{Doubles(n, 0.0), Doubles(n, 0.0)};
  for (int g = 0; g < in.g.group(); ++g) {
    const float* q = in.Query(n - 1, layer, head * in.g.group() + g);
    const double factor = std::exp(-NoiseOf(seen, in, p, layer, head, q) / 2);
    Doubles own(n), exact(n);
    double all = 0, all_exact = 0;
    for (int32_t t = 0; t < n; ++t) {
      exact[t] = std::exp(in.g.logit_scale() * Dot(q, in.Key(t, layer, head), in.g.head_dim));
      own[t] =
          std::exp(in.g.logit_scale() * std::inner_product(seen[t].begin(), seen[t].end(), q, 0.0));
      all += always(t) ? exact[t] : factor * own[t];
      all_exact += exact[t];
    }
    for (int32_t t = 0; t < n; ++t) {
      shares.estimated[t] += own[t] / all;
      shares.exact[t] += exact[t] / all_exact;
    }
  }
  return shares;
}

// What the chosen positions leave out, as a mean over the query heads: by the estimate, and truly;
// and the smallest candidate that is chosen, which would be left out next.
struct LeftOut {
  double estimated = 0, exact = 0, next = 1;

  LeftOut(const Shares& shares, const Ints& positions, Run candidates, int32_t group);
};

LeftOut::LeftOut(const Shares& shares, const Ints& positions, Run candidates, int32_t group) {
  size_t at = 0;
  for (int32_t t = 0; t < static_cast<int32_t>(shares.exact.size()); ++t) {
    if (at < positions.size() && positions[at] == t) {
      ++at;
      const bool competes = t >= candidates.begin && t < candidates.end;
      if (competes) next = std::min(next, shares.estimated[t] / group);
      continue;
    }
    estimated += shares.estimated[t] / group, exact += shares.exact[t] / group;
  }
}

// The rule, of any query, model and length: by the estimate no more is left out than max_missed, to
// the width of a bin, and not much less where more could be; and what is truly left out is near it.
TEST_P(Bits, ChoosesAsManyAsMaxMissedTakes) {
  const Inputs in(SmallGeometry(2, 3), 700, kSeed);
  for (const double missed : {0.3, 0.05, 0.01, 0.001}) {
    const std::string text = "bits{recent = 12, unit = 16, min_tokens = 0, max_missed = ";
    Selecting s(in, text + std::to_string(missed) + "}", backend());
    s.Prompt(640);
    s.PrefillDone();
    const double aim = 0.85 * missed;
    double truly = 0;
    int lists = 0;
    for (int32_t n = 641; n <= in.n; ++n) {
      const auto got = s.Step();
      for (int head = n % 6 == 0 ? 0 : 2; head < 2; ++head, ++lists) {
        const Shares shares = SharesOf(in, s.plan(), n, 1, head);
        const Ints positions = PositionsOf(got[1].runs[head]);
        const LeftOut left(shares, positions, {4, n - 12}, 3);
        const double slack = exact() ? 0.04 : 0.3;
        ASSERT_LE(left.estimated, aim * (1 + slack)) << "seed " << kSeed << " n " << n;
        ASSERT_GE(left.estimated + left.next, aim * (1 - slack)) << "seed " << kSeed << " n " << n;
        truly += left.exact;
      }
    }
    EXPECT_NEAR(truly / lists, aim, 0.35 * aim) << missed;
  }
}

TEST_P(Bits, ChoosesAsManyRunsAsMaxMissedTakes) {
  const Inputs in(SmallGeometry(2, 3), 700, kSeed);
  Selecting s(in, "bits{recent = 12, unit = 16, min_tokens = 0, max_missed = 0.05, run = 8}",
              backend());
  s.Prompt(690);
  s.PrefillDone();
  const double aim = 0.85 * 0.05, slack = exact() ? 0.04 : 0.3;
  for (int32_t n = 691; n <= in.n; ++n) {
    const auto got = s.Step();
    const kvstrata::Run range = CandidatesAt(s.plan(), n);
    const Shares shares = SharesOf(in, s.plan(), n, 1, 0);
    const Ints positions = PositionsOf(got[1].runs[0]);
    const LeftOut left(shares, positions, range, 3);
    ASSERT_LE(left.estimated, aim * (1 + slack)) << "seed " << kSeed << " n " << n;
    Doubles of_runs =
        SumRuns({shares.estimated.begin() + range.begin, shares.estimated.begin() + range.end}, 8);
    double next = 1e9;  // the least run that is chosen
    for (const int32_t t : positions) {
      if (t >= range.begin && t < range.end)
        next = std::min(next, of_runs[(t - range.begin) / 8] / 3);
    }
    ASSERT_GE(left.estimated + next, aim * (1 - slack)) << "seed " << kSeed << " n " << n;
  }
}

TEST_P(Bits, MaxMissedKeepsTheBudgetAsItsLimit) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  Selecting s(in, "bits{recent = 8, unit = 16, min_tokens = 0, max_missed = 0.0001, budget = 21}",
              backend());
  s.Prompt(180);
  s.PrefillDone();
  for (int i = 0; i < 20; ++i) {
    const Selection got = s.Step()[0];
    ASSERT_FALSE(got.full);
    for (const auto& runs : got.runs) EXPECT_EQ(PositionsOf(runs).size(), 4 + 8 + 21u);
  }
}

// What is always attended may hold it by itself.
TEST_P(Bits, MaxMissedMayChooseNothing) {
  Inputs in(SmallGeometry(), 200, kSeed);
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      float* const sink = const_cast<float*>(in.Key(0, layer, head));
      std::fill(sink, sink + 64, 20.0f);
    }
  }
  std::fill(in.queries.begin(), in.queries.end(), 1.0f);
  Selecting s(in, "bits{recent = 8, unit = 16, min_tokens = 0, max_missed = 0.01}", backend());
  s.Prompt(199);
  s.PrefillDone();
  EXPECT_EQ(PositionsOf(s.Step()[0].runs[1]), UnionOf(Upto(0, 4), Upto(192, 200)));
}

// Nothing of a call is left for the next one, or for a fork.
TEST_P(Bits, ACallLeavesNothingBehind) {
  const Inputs in(SmallGeometry(), 90, kSeed);
  const std::string plan = "bits{budget = 20, recent = 8, unit = 16, min_tokens = 0}";
  Selecting steady(in, plan, backend()), shaky(in, plan, backend());
  for (Selecting* s : {&steady, &shaky}) {
    s->Prompt(60);
    s->PrefillDone();
  }
  for (int i = 0; i < 25; ++i) {
    shaky.Begin();
    shaky.Select(i % 2);
    Selecting fork(shaky);
    const auto expected = steady.Step();
    const auto again = shaky.Step(), forked = fork.Step();
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_EQ(again[layer].runs, expected[layer].runs) << i;
      ASSERT_EQ(forked[layer].runs, expected[layer].runs) << i;
    }
  }
}

// Two threads take a head at a time; three would be idle for a third of it, and share each.
TEST_P(Bits, AnyNumberOfThreadsChoosesAlike) {
  const Inputs in(SmallGeometry(4), 3000, kSeed);
  const std::string plan = "bits{budget = 64, min_tokens = 0}";
  Selecting alone(in, plan, backend());
  alone.Prompt(2990, 512);
  alone.PrefillDone();
  std::vector<Selection> expected;
  for (int i = 0; i < 10; ++i) expected.push_back(alone.Step()[1]);
  for (int threads : {2, 3, 4}) {
    const std::unique_ptr<Executor> pool = NewThreadPool(threads);
    Selecting several(in, plan, backend());
    several.executor = pool.get();
    several.Prompt(2990, 512);
    several.PrefillDone();
    for (const Selection& one : expected) {
      ASSERT_EQ(several.Step()[1].runs, one.runs) << threads << " threads";
    }
  }
}

TEST_P(Bits, TiesGoToTheLowerToken) {
  Inputs in(SmallGeometry(), 60, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  Selecting s(in, "bits{budget = 5, sinks = 2, recent = 3, unit = 16, min_tokens = 0}", backend());
  std::fill(in.queries.begin(), in.queries.end(), 0.0f);
  s.Prompt(50);
  s.PrefillDone();
  for (int i = 0; i < 3; ++i) {
    const Selection got = s.Step()[1];
    EXPECT_EQ(PositionsOf(got.runs[0]), UnionOf(Upto(0, 7), Upto(s.tokens() - 3, s.tokens())));
  }
}

// Runs of equal sums, too: of 4 .. 48 two are taken, and what is after the last whole one is on.
TEST_P(Bits, TiesGoToTheLowerRun) {
  Inputs in(SmallGeometry(), 60, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  std::fill(in.queries.begin(), in.queries.end(), 0.0f);
  Selecting s(in, "bits{budget = 11, sinks = 2, recent = 3, unit = 16, run = 4, min_tokens = 0}",
              backend());
  s.Prompt(51);
  s.PrefillDone();
  EXPECT_EQ(PositionsOf(s.Step()[1].runs[0]), UnionOf(Upto(0, 12), Upto(48, 52)));
}

// A step reads whole groups, and keys where none is sealed.
TEST_P(Bits, CountsTheBytesThatItScores) {
  const Inputs in(SmallGeometry(), 120, kSeed);
  Selecting s(in, "bits{budget = 20, sinks = 20, recent = 8, unit = 16, min_tokens = 0}",
              backend());
  s.Prompt(105);
  s.PrefillDone();
  // Candidates are 20 .. 97: groups 1 to 5, and keys 96 and 97.
  const int64_t group = 4 * 64 + 16 * 64 * 2 / 8;
  EXPECT_EQ(s.Step()[0].scored_bytes, 2 * (5 * group + 2 * 128));
}

TEST_P(Bits, KeepsNoArrays) {
  const Inputs in(SmallGeometry(), 20, kSeed);
  Selecting s(in, "bits", backend());
  s.Prompt(20);
  EXPECT_EQ(s.Inspect("scores").status().reason(), "INSPECT_UNKNOWN");
  EXPECT_EQ(s.StatusText(), "");
}

// Where a codec has packed the keys of a group that is not sealed, those are what is scored. Of one
// KV head without sealed groups that is what selector vote chooses.
TEST_P(Bits, ReachesPackedRows) {
  const Inputs in(SmallGeometry(1), 160, kSeed);
  const Plan plan = PlanOf(
      "bits{codec = 'packed', max_loss = 1, budget = 24, sinks = 5, recent = 9, unit = 256, "
      "min_tokens = 0, segment = 64, buffer = 32, keep = 48}");
  const Plan votes = PlanOf(
      "tokenselect{codec = 'packed', max_loss = 1, k = 24, n_init = 5, n_local = 9, theta = 1, "
      "min_tokens = 0, segment = 64, buffer = 32, keep = 48}");
  CodecSequence sequence(plan, in.g, in, nullptr, GetParam());
  sequence.Commit(150);
  sequence.PrefillDone();
  sequence.Settle();
  const auto packed = CodecOf(plan).parse(sequence.View(), sequence.geometry());
  ASSERT_TRUE(packed.ok()) << packed.status().ToString();
  ASSERT_GT((*packed)->end(), 5);
  const IndexLayout index = IndexOf(plan, in.g);
  SelectContext context = sequence.Context(packed->get());
  context.index = &index;
  Selection got, voted;
  NewSelector(plan, in.g)->Select(context, 1, in.Query(150, 1, 0), &got);
  NewSelector(votes, in.g)->Select(context, 1, in.Query(150, 1, 0), &voted);
  ASSERT_FALSE(got.full);
  EXPECT_EQ(got.runs, voted.runs);
  EXPECT_EQ(got.scored_bytes, voted.scored_bytes);
}

KVS_FOR_EACH_BACKEND(Bits);

}  // namespace
}  // namespace kvstrata
