// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "tests/kernels/planes_fixture.h"

namespace kvstrata {
namespace {

using Op = decltype(&AttendPlanesRef);
Op attend_planes = AttendPlanesRef;  // what the test that runs is about

// Each test on every backend that this CPU has.
struct OpCase {
  std::string name;
  Op op;
  SimdTarget target{};
};
std::vector<OpCase> OpCases() {
  std::vector<OpCase> cases = {{"ref", AttendPlanesRef}};
  for (SimdTarget target : AvailableSimdTargets()) {
    cases.push_back({std::string(NameOf(target)), AttendPlanesSimd, target});
  }
  return cases;
}
class AttendPlanes : public ::testing::TestWithParam<OpCase> {
 protected:
  void SetUp() override {
    if (!IsRef()) ForceSimdTarget(GetParam().target);
    attend_planes = GetParam().op;
  }
  void TearDown() override {
    attend_planes = AttendPlanesRef;
    if (!IsRef()) ForceSimdTarget(before_);
  }
  bool IsRef() const { return GetParam().op == AttendPlanesRef; }

 private:
  const SimdTarget before_ = AvailableSimdTargets().empty() ? SimdTarget{} : CurrentSimdTarget();
};
INSTANTIATE_TEST_SUITE_P(Backends, AttendPlanes, ::testing::ValuesIn(OpCases()),
                         [](const auto& of) { return of.param.name; });

struct Partial {
  std::vector<float> m, l, o;
  bool operator==(const Partial&) const = default;
};

struct Answer {
  Partial partial;
  std::vector<uint8_t> fine, strips;
  bool operator==(const Answer&) const = default;

  int Fine() const { return std::accumulate(fine.begin(), fine.end(), 0); }
  int Strips() const { return std::accumulate(strips.begin(), strips.end(), 0); }
};

Partial Poisoned(int rows, int dim) {
  const auto n = static_cast<size_t>(rows);
  return {std::vector<float>(n, kNaN), std::vector<float>(n, kNaN),
          std::vector<float>(n * static_cast<size_t>(dim), kNaN)};
}

// One layer and KV head of a sequence of `tokens` at a step: groups, and what is left as raw rows.
struct StepOf {
  PlanesRows rows;
  PagedRows keys, values;
  int tokens = 0;
  const float* q = nullptr;
  int queries = 1, group = 1;
  float scale = 0.125f;
  // The partial of rows [begin, tokens), as op attend_raw has it.
  Partial Raw(int begin) const {
    Partial raw = Poisoned(queries * group, keys.dim);
    const Run run{begin, tokens};
    AttendWork work;
    work.k = keys, work.v = values, work.q = q, work.q_token = int64_t{group} * keys.dim;
    work.queries = queries, work.group = group, work.position = tokens - 1;
    work.runs = &run, work.run_count = 1, work.scale = scale;
    work.m = raw.m.data(), work.l = raw.l.data(), work.o = raw.o.data();
    AttendRawRef(&work, 1, InlineExecutor());
    return raw;
  }

  // Outputs are poisoned; what lies behind flags must stay.
  Answer Attend(const PlanesRule& rule) const {
    constexpr uint8_t kPoison = 0xA5;
    constexpr size_t kGuard = 16;
    const Partial raw = Raw(rows.tokens());
    Answer answer{Poisoned(queries * group, rows.format.dim),
                  std::vector<uint8_t>(rows.tokens() + kGuard, kPoison),
                  std::vector<uint8_t>(rows.strips() + kGuard, kPoison)};
    AttendPlanesWork work;
    work.rows = rows, work.rule = rule, work.tokens = tokens, work.q = q;
    work.q_token = int64_t{group} * keys.dim, work.queries = queries, work.group = group;
    work.scale = scale, work.raw_m = raw.m.data(), work.raw_l = raw.l.data();
    work.m = answer.partial.m.data(), work.l = answer.partial.l.data();
    work.o = answer.partial.o.data();
    work.fine = answer.fine.data(), work.strips = answer.strips.data();
    attend_planes(&work, 1, InlineExecutor());
    for (auto* flags : {&answer.fine, &answer.strips}) {
      for (size_t i = 1; i <= kGuard; ++i) EXPECT_EQ((*flags)[flags->size() - i], kPoison);
      flags->resize(flags->size() - kGuard);
      for (uint8_t flag : *flags) EXPECT_LE(flag, 1);
    }
    return answer;
  }

  // The output over groups and raw rows [queries * group][dim].
  std::vector<float> Merged(const Answer& answer) const {
    const Partial raw = Raw(rows.tokens());
    std::vector<float> m = answer.partial.m, l = answer.partial.l, o = answer.partial.o;
    m.insert(m.end(), raw.m.begin(), raw.m.end());
    l.insert(l.end(), raw.l.begin(), raw.l.end());
    o.insert(o.end(), raw.o.begin(), raw.o.end());
    std::vector<float> out(raw.o.size(), kNaN);
    MergeWork work;
    work.m = m.data(), work.l = l.data(), work.o = o.data(), work.parts = 2;
    work.rows = queries * group, work.group = group, work.dim = rows.format.dim;
    work.out = out.data(), work.out_token = int64_t{group} * rows.format.dim;
    MergeRef(&work, 1, InlineExecutor());
    return out;
  }
};

constexpr PlanesRule kShare{0.25, 0, 1, 1, 1, 4, 12};
constexpr PlanesRule kAbove{0, 4, 1, 1, 16, 4, 12};
constexpr PlanesRule kRuns{0.25, 0, 1, 8, 1, 5, 12};
constexpr PlanesRule kAll{1, 0, 1, 1, 1, 4, 12};

// Queries of a few tokens; the heads of a token look for nearly the same.
std::vector<float> QueriesOf(Random& random, int queries, int group, int dim) {
  std::vector<float> q;
  for (int i = 0; i < queries; ++i) {
    const std::vector<float> aim = NormalFloats(random, static_cast<size_t>(dim));
    for (int g = 0; g < group; ++g) {
      for (float x : aim) q.push_back(x + 0.2f * random.Normal());
    }
  }
  return q;
}

// Random rows, one of which the first query looks for.
struct Sequence {
  PagedFixture keys, values;
  std::vector<float> q;
  PlanesFixture planes;
  StepOf step;

  Sequence(Random& random, const PlanesFormat& f, int tokens, int queries = 1, int group = 3)
      : keys(random, DType::kBF16, tokens, 16, f.dim),
        values(random, DType::kBF16, tokens, 16, f.dim),
        q(QueriesOf(random, queries, group, f.dim)),
        planes(Planted(tokens / 3), values.rows, f, (tokens - 1) / f.tokens),
        step{planes.rows, keys.rows, values.rows, tokens,
             q.data(),    queries,   group,       1 / std::sqrt(static_cast<float>(f.dim))} {}
  Sequence(const Sequence&) = delete;

 private:
  // The keys, of which one is the first query.
  PagedRows Planted(int token) {
    for (int c = 0; c < keys.rows.dim; ++c) keys.Set(token, c, q[c]);
    return keys.rows;
  }
};

// What no rule reads may be anything: rows of tokens that are not fine, values of strips that are
// left out. NaN scales would show in any sum that they enter.
TEST_P(AttendPlanes, ReadsNothingElse) {
  Random random;
  SCOPED_TRACE(random.Trace());
  int coarse = 0, left_out = 0;
  for (const PlanesFormat& f : PlanesFormats()) {
    for (const PlanesRule& rule : {kShare, kAbove, kRuns}) {
      SCOPED_TRACE(NameOf(f));
      Sequence s(random, f, 5 * f.tokens + 3);
      const Answer answer = s.step.Attend(rule);
      for (int t = 0; t < s.step.rows.tokens(); ++t) {
        PlanesGroup& group = s.planes.groups[t / f.tokens];
        const int at = t % f.tokens;
        if (answer.fine[t] == 0) {
          std::fill_n(group.Lower() + at * f.row_bytes(), f.row_bytes(), std::byte{0xFF});
        }
        if (answer.strips[t / 16] != 0) continue;
        std::fill_n(group.Upper() + f.value_minimum() + 2 * at, 2, std::byte{0xFF});
        std::fill_n(group.Upper() + f.value_step() + 2 * at, 2, std::byte{0xFF});
        std::fill_n(group.Upper() + f.value_codes() + at / 16 * 4 * f.dim, 4 * f.dim,
                    std::byte{0xFF});
      }
      EXPECT_TRUE(s.step.Attend(rule) == answer);
      coarse += s.step.rows.tokens() - answer.Fine();
      left_out += s.step.rows.strips() - answer.Strips();
    }
  }
  EXPECT_GT(coarse, 0);
  EXPECT_GT(left_out, 0);
}

// A wide step hides what a token's digits add to its logit. The variance of that is in its score.
TEST_P(AttendPlanes, ATokenWhoseCoarseLogitIsTooLowIsFine) {
  Random random;
  SCOPED_TRACE(random.Trace());
  constexpr int kToken = 330, kChannel = 9;
  for (int keep : {8, 4}) {
    const PlanesFormat f{64, 64, keep};
    Sequence s(random, f, 641, 1, 2);
    for (int g = 0; g < 2; ++g) s.q[g * f.dim + kChannel] = 24;
    for (int t = 0; t < 641; ++t) s.keys.Set(t, kChannel, 0.1f * random.Normal());
    for (int c = 0; c < f.dim; ++c) s.keys.Set(kToken, c, 0);
    s.keys.Set(kToken, kChannel, 2);  // counts as nearly 0, the middle of a cell of 4
    s.keys.Set(kToken + 1, kChannel, -14);
    const PlanesFixture wide(s.keys.rows, s.values.rows, f, 10);
    s.step.rows = wide.rows;
    for (const PlanesRule& rule : {PlanesRule{0, 8, 2, 1, 16}, PlanesRule{0.2, 0, 2, 1, 1}}) {
      const Answer answer = s.step.Attend(rule);
      EXPECT_EQ(answer.fine[kToken], 1) << keep;
      EXPECT_LE(answer.Fine(), 200);
    }
  }
}

// And what a rule reads counts: any other byte changes the answer.
TEST_P(AttendPlanes, ReadsWhatItChooses) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Sequence s(random, {64, 16, 8}, 150);
  const Answer answer = s.step.Attend(kShare);
  ASSERT_EQ(answer.fine[50], 1);
  PlanesGroup& group = s.planes.groups[3];
  for (int64_t at :
       {int64_t{0}, int64_t{16}, int64_t{48}, int64_t{64}}) {  // planes of key, of value
    std::byte& digit = group.Lower()[2 * group.format.row_bytes() + at];
    digit ^= std::byte{0xFF};
    EXPECT_FALSE(s.step.Attend(kShare).partial == answer.partial) << at;
    digit ^= std::byte{0xFF};
  }
  EXPECT_TRUE(s.step.Attend(kShare) == answer);
}

// With everything fine: attention over the rows that the groups stand for.
TEST_P(AttendPlanes, AllFineIsAttentionOverUnpackedRows) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (const PlanesFormat& f : PlanesFormats()) {
    SCOPED_TRACE(NameOf(f));
    Sequence s(random, f, 3 * f.tokens + 1 + random.Below(f.tokens), 2);
    PagedFixture keys(random, DType::kF32, s.step.tokens, 16, f.dim);
    PagedFixture values(random, DType::kF32, s.step.tokens, 16, f.dim);
    for (int t = 0; t < s.step.rows.tokens(); ++t) {
      const auto [k, v] = s.planes.groups[t / f.tokens].Unpacked();
      for (int c = 0; c < f.dim; ++c) {
        keys.Set(t, c, k[t % f.tokens * f.dim + c]);
        values.Set(t, c, v[t % f.tokens * f.dim + c]);
      }
    }
    const Answer answer = s.step.Attend(kAll);
    EXPECT_EQ(answer.Fine(), s.step.rows.tokens());
    EXPECT_EQ(answer.Strips(), s.step.rows.strips());
    StepOf raw = s.step;
    raw.keys = keys.rows, raw.values = values.rows, raw.tokens = s.step.rows.tokens();
    const Partial want = raw.Raw(0);
    EXPECT_LE(RelativeL2(answer.partial.m, want.m), 1e-5);
    EXPECT_LE(RelativeL2(answer.partial.l, want.l), 1e-5);
    EXPECT_LE(RelativeL2(answer.partial.o, want.o), 1e-5);
  }
}

TEST_P(AttendPlanes, TheFirstQueryChooses) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Sequence s(random, {64, 16, 8}, 200, 2, 4);
  for (const PlanesRule& rule : {kShare, kAbove, kRuns}) {
    const Answer both = s.step.Attend(rule);
    StepOf one = s.step;
    one.queries = 1;
    const Answer first = one.Attend(rule);
    EXPECT_EQ(both.fine, first.fine);
    EXPECT_EQ(both.strips, first.strips);
    EXPECT_TRUE(std::equal(first.partial.o.begin(), first.partial.o.end(), both.partial.o.begin()));
  }
  // The second query attends by its own logits.
  StepOf second = s.step;
  second.queries = 1, second.q += 4 * 64;
  EXPECT_FALSE(second.Attend(kShare).fine == s.step.Attend(kShare).fine);
  const Answer both = s.step.Attend(kAll), own = second.Attend(kAll);
  EXPECT_TRUE(
      std::equal(own.partial.o.begin(), own.partial.o.end(), both.partial.o.begin() + 4 * 64));
}

TEST_P(AttendPlanes, WithoutCandidatesOrGroups) {
  Random random;
  SCOPED_TRACE(random.Trace());
  const PlanesFormat f{64, 16, 8};
  for (int tokens : {1, 16, 17, 33}) {
    Sequence s(random, f, tokens);
    PlanesRule rule = kShare;
    rule.recent = 40;
    const Answer answer = s.step.Attend(rule);
    EXPECT_EQ(answer.Fine(), s.step.rows.tokens());
    EXPECT_EQ(answer.Strips(), s.step.rows.strips());
    for (size_t g = 0; tokens <= 16 && g < 3; ++g) {
      EXPECT_EQ(answer.partial.m[g], -kInf);
      EXPECT_EQ(answer.partial.l[g], 0);
    }
    for (float x : s.step.Merged(answer)) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST_P(AttendPlanes, AQueryThatIsNotFiniteSpoilsItsOwnHead) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Sequence s(random, {64, 16, 8}, 150);
  s.q[64 + 7] = kNaN;
  for (const PlanesRule& rule : {kShare, kAbove}) {
    const Answer answer = s.step.Attend(rule);
    EXPECT_EQ(answer.Strips(), s.step.rows.strips());
    const std::vector<float> out = s.step.Merged(answer);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i / 64 == 1) << i;
  }
}

TEST_P(AttendPlanes, ManyItemsOverAPool) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Sequence s(random, {128, 32, 4}, 300);
  const Answer want = s.step.Attend(kRuns);
  const Partial raw = s.step.Raw(s.step.rows.tokens());
  std::vector<Answer> answers(8, want);
  std::vector<AttendPlanesWork> work(8);
  for (size_t i = 0; i < work.size(); ++i) {
    answers[i].partial = Poisoned(3, 128);
    AttendPlanesWork& w = work[i];
    w.rows = s.step.rows, w.rule = kRuns, w.tokens = 300, w.q = s.q.data(), w.group = 3;
    w.scale = s.step.scale, w.raw_m = raw.m.data(), w.raw_l = raw.l.data();
    w.m = answers[i].partial.m.data(), w.l = answers[i].partial.l.data();
    w.o = answers[i].partial.o.data();
    w.fine = answers[i].fine.data(), w.strips = answers[i].strips.data();
  }
  attend_planes(work.data(), 8, *NewThreadPool(2));
  for (const Answer& answer : answers) EXPECT_TRUE(answer == want);
}

// Choices may differ where scores nearly tie; everything else is close.
class AttendPlanesOnSimd : public SimdTest {
 protected:
  static Answer By(Op op, const Sequence& s, const PlanesRule& rule) {
    attend_planes = op;
    const Answer answer = s.step.Attend(rule);
    attend_planes = AttendPlanesRef;
    return answer;
  }
};
KVS_INSTANTIATE_SIMD(AttendPlanesOnSimd);

// Sequences are so long that one token whose tie falls the other way has little of the answer.
TEST_P(AttendPlanesOnSimd, IsTheReferenceButForNearTies) {
  SCOPED_TRACE(random_.Trace());
  int fine = 0, others = 0;
  for (const PlanesFormat& f : PlanesFormats()) {
    for (const PlanesRule& rule : {kShare, kAbove, kRuns, kAll}) {
      SCOPED_TRACE(NameOf(f));
      const int sealed = std::max(6 * f.tokens, 512);
      Sequence s(random_, f, sealed + 1 + random_.Below(f.tokens), 1 + random_.Below(2),
                 1 + random_.Below(10));
      const Answer want = By(AttendPlanesRef, s, rule), got = By(AttendPlanesSimd, s, rule);
      fine += want.Fine();
      for (size_t t = 0; t < want.fine.size(); ++t) others += want.fine[t] != got.fine[t];
      const bool same = got.fine == want.fine && got.strips == want.strips;
      // Weights of 64 tokens are rounded to 8 bits of the largest: .0011 of it each, rms, and in
      // the worst case that the others are as nothing beside it, eight times as much in the sum.
      EXPECT_LE(RelativeL2(s.step.Merged(got), s.step.Merged(want)), same ? 1e-2 : 0.1);
    }
  }
  EXPECT_LE(others, fine / 50);
}

TEST(AttendPlanesDeathTest, RefusesRulesThatContradict) {
  Random random;
  Sequence s(random, {64, 16, 8}, 100);
  PlanesRule runs_above = kAbove, crooked = kShare, blind = kShare, open = kShare;
  runs_above.run = 8, crooked.run = 3, blind.sample = 0, open.recent = 0;
  for (const PlanesRule& rule : {runs_above, crooked, blind, open}) {
    EXPECT_DEATH(s.step.Attend(rule), "broken invariant");
  }
  s.step.tokens = s.step.rows.tokens();
  EXPECT_DEATH(s.step.Attend(kShare), "broken invariant");
}

// ---- tests/golden ----

struct Ragged {
  const int32_t* offsets;
  const int32_t* numbers;

  Ragged(const GoldenArrays& golden, const std::string& name)
      : offsets(golden.Get(name + "_offsets", "<i4").As<int32_t>()),
        numbers(golden.Get(name, "<i4").As<int32_t>()) {}
  // As flags of the first n, whatever lies beyond.
  std::vector<uint8_t> Flags(int64_t row, size_t n) const {
    std::vector<uint8_t> flags(n);
    for (int32_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      if (static_cast<size_t>(numbers[i]) < n) flags[numbers[i]] = 1;
    }
    return flags;
  }
};

struct GoldenStep {
  const GoldenArrays& golden;
  std::string plan;
  int steps, layers, heads, group, prompt;

  GoldenStep(const GoldenArrays& arrays, const std::string& name) : golden(arrays), plan(name) {
    const GoldenArray& keys = golden.Get("keys_bf16", "<u2");
    layers = static_cast<int>(keys.shape[0]), heads = static_cast<int>(keys.shape[2]);
    group = static_cast<int>(golden.Get("queries_bf16", "<u2").shape[2]) / heads;
    steps = static_cast<int>(golden.Get("entropy", "<f4").shape[0]);
    prompt = static_cast<int>(golden.Get("surprisal", "<f4").shape[0]);
  }

  void Check(int t, int layer, int head) const {
    const GoldenPlanes options = GoldenPlanes::Of(golden, plan);
    const PlanesFormat& f = options.format;
    const GoldenKeys keys(golden.Get("keys_bf16", "<u2"), layer, head);
    const GoldenKeys values(golden.Get("values_bf16", "<u2"), layer, head);
    const int tokens = prompt + t + 1;
    const PlanesFixture planes(keys.rows, values.rows, f, (tokens - 1) / f.tokens);
    const std::vector<float> q = Queries(t, layer, head);
    const StepOf step{
        planes.rows, keys.rows, values.rows, tokens,
        q.data(),    1,         group,       1 / std::sqrt(static_cast<float>(f.dim))};
    const Answer answer = step.Attend(options.rule);
    const int64_t row = (int64_t{t} * layers + layer) * heads + head;
    ASSERT_EQ(golden.Get(plan + ".stable", "|u1").As<uint8_t>()[row], 1);
    EXPECT_EQ(answer.fine, Ragged(golden, plan + ".tokens").Flags(row, answer.fine.size()));
    EXPECT_EQ(answer.strips, Ragged(golden, plan + ".units").Flags(row, answer.strips.size()));
    const int64_t raw_bytes = int64_t{4} * f.dim * (tokens - planes.rows.tokens());
    EXPECT_EQ(PlanesBytesRead(planes.rows, answer.fine.data(), answer.strips.data()) + raw_bytes,
              golden.Get(plan + ".bytes_read", "<i4").As<int32_t>()[row]);
    const float* out = golden.Get(plan + ".out", "<f4").As<float>() + row * group * f.dim;
    const std::vector<float> got = step.Merged(answer);
    EXPECT_LE(RelativeL2(got, {out, out + got.size()}), 1e-5);
  }

 private:
  std::vector<float> Queries(int t, int layer, int head) const {
    const GoldenArray& queries = golden.Get("queries_bf16", "<u2");
    const int64_t tail = queries.shape[0] - steps, size = group * queries.shape[3];
    const uint16_t* at =
        queries.As<uint16_t>() + (((tail + t) * layers + layer) * heads + head) * size;
    std::vector<float> q;
    for (int64_t i = 0; i < size; ++i) q.push_back(ToFloat(BF16{at[i]}));
    return q;
  }
};

TEST(AttendPlanesGolden, Steps) {
  for (int seed : kGoldenPlanes) {
    const GoldenArrays golden = GoldenPlanesCase(seed);
    for (const char* plan : {"planes", "planes_above", "planes_runs"}) {
      SCOPED_TRACE(std::to_string(seed) + " " + plan);
      ASSERT_TRUE(golden.Has(plan + std::string(".out")));
      const GoldenStep vector(golden, plan);
      for (int t = 0; t < vector.steps; ++t) {
        for (int i = 0; i < vector.layers * vector.heads; ++i) {
          vector.Check(t, i / vector.heads, i % vector.heads);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvstrata
