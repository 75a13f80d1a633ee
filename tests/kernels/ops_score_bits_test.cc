// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>

#include "kernels/backend/backend.h"
#include "tests/kernels/golden_bits.h"
#include "tests/kernels/quantised_keys.h"

namespace kvstrata {
namespace {

using Op = decltype(&ScoreBitsRef);

// Logits, with poison between the queries and behind them.
std::vector<float> Scores(Op op, ScoreBitsWork work, Executor& executor = InlineExecutor()) {
  const int64_t n = work.run.end - work.run.begin;
  work.out_query = n + 3;
  std::vector<float> out(static_cast<size_t>(work.queries * work.out_query), 7.0f);
  work.out = out.data();
  op(&work, 1, executor);
  for (int i = 0; i < work.queries; ++i) {
    for (int64_t t = n; t < work.out_query; ++t) EXPECT_EQ(out[i * work.out_query + t], 7);
  }
  return out;
}

// What score_bits.h allows simd to be off by, of one query's logits in a group.
float BoundOf(const ScoreBitsWork& w, const float* q, const std::byte* group) {
  const QuantisedGroup& f = w.rows.format;
  const double codes = (1 << f.bits) - 1;
  double largest = 0, size = 0;
  for (int c = 0; c < f.dim; ++c) {
    const double step = std::abs(static_cast<double>(q[c]) * StepOf(f, group, c));
    largest = std::max(largest, step);
    size += std::abs(static_cast<double>(q[c]) * MinimumOf(group, c)) + codes * step;
  }
  const double rounding = codes / 2 / 254 * f.dim * largest * (1 + 1e-5);
  return static_cast<float>(w.scale * (rounding + codes / 2 * f.dim * 1e-30 + 1e-5 * size));
}

class ScoreBits : public SimdTest {
 protected:
  void ExpectLikeRef(const ScoreBitsWork& work) {
    const auto ref = Scores(ScoreBitsRef, work), simd = Scores(ScoreBitsSimd, work);
    const int tokens = work.rows.format.tokens, dim = work.rows.format.dim;
    size_t at = 0;
    for (int i = 0; i < work.queries; ++i, at += 3) {
      float bound = 0;
      for (int t = work.run.begin; t < work.run.end; ++t, ++at) {
        if (t == work.run.begin || t % tokens == 0) {
          bound = BoundOf(work, work.q + i * dim, work.rows.Group(t / tokens));
        }
        ASSERT_LE(std::abs(simd[at] - ref[at]), bound)
            << "query " << i << " token " << t << ": " << simd[at] << ", ref " << ref[at];
      }
    }
  }
};

TEST_P(ScoreBits, EveryFormatRunAndQueryCount) {
  SCOPED_TRACE(random_.Trace());
  for (const QuantisedGroup& f : GroupFormats()) {
    const int tokens = 3 * f.tokens;
    const PagedFixture keys(random_, DType::kBF16, tokens, 16, f.dim);
    const QuantisedFixture rows(random_, keys, f, 3, 2);
    const int inside = 1 + random_.Below(tokens - 2);
    for (int queries : {1, 2, 3, 4, 7, 8}) {
      SCOPED_TRACE(NameOf(f) + " queries " + std::to_string(queries));
      const auto q = NormalFloats(random_, static_cast<size_t>(queries * f.dim));
      for (kvstrata::Run run :
           {kvstrata::Run{0, tokens}, kvstrata::Run{inside, inside + 1},
            kvstrata::Run{inside, tokens}, kvstrata::Run{0, inside}, kvstrata::Run{9, 9}}) {
        ExpectLikeRef({rows.rows, run, q.data(), queries, 0.125f});
      }
    }
  }
}

// One channel outweighs all others, in the query or in the keys; constant channels; the least and
// the largest steps; queries of zero.
TEST_P(ScoreBits, AdversarialScales) {
  SCOPED_TRACE(random_.Trace());
  for (int bits : {2, 3, 4}) {
    for (int round = 0; round < 8; ++round) {
      const QuantisedGroup f{128, bits, 64};
      PagedFixture keys(random_, DType::kF32, 128, 16, f.dim);
      auto q = NormalFloats(random_, static_cast<size_t>(4 * f.dim));
      const int odd = random_.Below(f.dim);
      for (int t = 0; t < 128; ++t) {
        for (int c = 0; c < f.dim; ++c) {
          if (round == 1) keys.Set(t, c, 3);
          if (round == 2) keys.Set(t, c, std::ldexp(keys.Get(t, c), -23));
          if (round == 3) keys.Set(t, c, 60000 * (random_.Below(2) - 0.5f));
          if (round == 4) keys.Set(t, c, std::ldexp(keys.Get(t, c), -140));
          if (round == 5) keys.Set(t, c, keys.Get(t, c) + 100);
        }
        if (round == 6) keys.Set(t, odd, 1000 * keys.Get(t, odd));
      }
      for (size_t i = 0; i < q.size(); ++i) {
        if (round == 7) q[i] *= static_cast<int>(i) % f.dim == odd ? 1e4f : 1.0f;
        if (round == 0 && i < 128) q[i] = 0;
        if (round == 0 && i >= 128 && i < 256) q[i] = std::ldexp(q[i], -130);
      }
      const QuantisedFixture rows(random_, keys, f, 2);
      SCOPED_TRACE(NameOf(f) + " round " + std::to_string(round));
      ExpectLikeRef({rows.rows, {0, 128}, q.data(), 4, 1.0f});
    }
  }
}

// The largest sums that whole numbers must hold: every code the largest, every product alike.
TEST_P(ScoreBits, LargestSums) {
  SCOPED_TRACE(random_.Trace());
  for (QuantisedGroup f : GroupFormats()) {
    if (f.tokens != 64) continue;
    PagedFixture keys(random_, DType::kF32, 64, 16, f.dim);
    for (int c = 0; c < f.dim; ++c) {
      for (int t = 0; t < 64; ++t)
        keys.Set(t, c, t == 0 ? 0.0f : static_cast<float>((1 << f.bits) - 1));
    }
    const QuantisedFixture rows(random_, keys, f, 1);
    std::vector<float> q(static_cast<size_t>(4 * f.dim), 1.0f);
    std::fill(q.begin() + f.dim, q.begin() + 2 * f.dim, -1.0f);
    const auto simd = Scores(ScoreBitsSimd, {rows.rows, {0, 64}, q.data(), 4, 1.0f});
    const auto most = static_cast<float>(f.dim * ((1 << f.bits) - 1));
    EXPECT_NEAR(simd[0], 0, 1e-3);
    for (int t = 1; t < 64; ++t) {
      ASSERT_NEAR(simd[t], most, 1e-5 * most) << NameOf(f);
      ASSERT_NEAR(simd[67 + t], -most, 1e-5 * most) << NameOf(f);
    }
  }
}

// Where keys lie on their group's grid nothing is lost but the query's rounding, and that is none
// of whole numbers up to 127 with one step for all channels.
TEST_P(ScoreBits, KeysOnTheGridScoreAsTheyAre) {
  SCOPED_TRACE(random_.Trace());
  for (QuantisedGroup f : GroupFormats()) {
    PagedFixture keys(random_, DType::kF32, f.tokens, 16, f.dim);
    for (int c = 0; c < f.dim; ++c) {
      for (int t = 0; t < f.tokens; ++t) {
        const int code = t == 0 ? 0 : t == 1 ? (1 << f.bits) - 1 : random_.Below(1 << f.bits);
        keys.Set(t, c, 0.25f * static_cast<float>(code - 1));
      }
    }
    std::vector<float> q(static_cast<size_t>(4 * f.dim));
    for (float& x : q) x = static_cast<float>(random_.Below(255) - 127);
    for (int i = 0; i < 4; ++i) q[i * f.dim] = 127;
    const QuantisedFixture rows(random_, keys, f, 1);
    std::vector<float> raw(static_cast<size_t>(4 * (f.tokens + 3)), 7.0f);
    const ScoreTokensWork exact{keys.rows, {0, f.tokens}, q.data(), 4, 1, raw.data(), f.tokens + 3};
    ScoreTokensRef(&exact, 1, InlineExecutor());
    const ScoreBitsWork work{rows.rows, {0, f.tokens}, q.data(), 4, 1.0f};
    EXPECT_EQ(Scores(ScoreBitsRef, work), raw) << NameOf(f);
    const auto simd = Scores(ScoreBitsSimd, work);
    for (size_t i = 0; i < raw.size(); ++i) ASSERT_NEAR(simd[i], raw[i], 0.02) << NameOf(f);
  }
}

// A larger code of a channel raises a score where the query is positive there, and lowers it where
// it is negative.
TEST_P(ScoreBits, MonotoneInEveryCode) {
  SCOPED_TRACE(random_.Trace());
  for (QuantisedGroup f : GroupFormats()) {
    if (f.tokens != 48) continue;
    PagedFixture keys(random_, DType::kF32, f.tokens, 16, f.dim);
    const auto q = NormalFloats(random_, static_cast<size_t>(f.dim));
    const float largest = *std::max_element(
        q.begin(), q.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    for (int round = 0; round < 20; ++round) {
      const int c = random_.Below(f.dim);
      if (std::abs(q[c]) < std::abs(largest) / 32) continue;  // may round to nothing
      // Tokens alike but for channel c, which rises.
      for (int t = 0; t < f.tokens; ++t) {
        for (int i = 0; i < f.dim; ++i) keys.Set(t, i, t == 1 ? 1.0f : 0.0f);
        keys.Set(t, c, t < 2 ? static_cast<float>(t) : static_cast<float>(t) / 48);
      }
      const QuantisedFixture rows(random_, keys, f, 1);
      const auto scores = Scores(ScoreBitsSimd, {rows.rows, {2, f.tokens}, q.data(), 1, 1.0f});
      for (int t = 3; t < f.tokens; ++t) {
        const int rise =
            CodeAt(f, rows.rows.Group(0), t, c) - CodeAt(f, rows.rows.Group(0), t - 1, c);
        const float change = (scores[t - 2] - scores[t - 3]) * (q[c] > 0 ? 1.0f : -1.0f);
        EXPECT_TRUE(rise > 0 ? change > 0 : change == 0) << NameOf(f) << " channel " << c;
      }
    }
  }
}

TEST_P(ScoreBits, CutsDoNotChangeABit) {
  SCOPED_TRACE(random_.Trace());
  const QuantisedGroup f{128, 2, 64};
  const PagedFixture keys(random_, DType::kBF16, 64 * 12, 16, f.dim);
  const QuantisedFixture rows(random_, keys, f, 12);
  const auto q = NormalFloats(random_, static_cast<size_t>(4 * f.dim));
  constexpr int kTokens = 64 * 12;
  std::vector<float> whole(4 * kTokens), cut(4 * kTokens, kNaN);
  const ScoreBitsWork all{rows.rows, {0, kTokens}, q.data(), 4, 0.1f, whole.data(), kTokens};
  ScoreBitsSimd(&all, 1, InlineExecutor());
  std::vector<ScoreBitsWork> parts;
  for (int t = 0; t < kTokens;) {
    const int end = std::min(kTokens, t + 1 + random_.Below(150));
    parts.push_back({rows.rows, {t, end}, q.data(), 4, 0.1f, cut.data() + t, kTokens});
    t = end;
  }
  ScoreBitsSimd(parts.data(), static_cast<int64_t>(parts.size()), *NewThreadPool(2));
  EXPECT_TRUE(whole == cut);
}

TEST_P(ScoreBits, QueriesThatAreNoNumbersStayInTheirRow) {
  SCOPED_TRACE(random_.Trace());
  const QuantisedGroup f{64, 2, 16};
  const PagedFixture keys(random_, DType::kBF16, 16, 16, f.dim);
  const QuantisedFixture rows(random_, keys, f, 1);
  auto q = NormalFloats(random_, static_cast<size_t>(4 * f.dim));
  const auto before = Scores(ScoreBitsSimd, {rows.rows, {0, 16}, q.data(), 4, 1.0f});
  q[64 + 5] = kNaN, q[128 + 6] = kInf;
  const auto after = Scores(ScoreBitsSimd, {rows.rows, {0, 16}, q.data(), 4, 1.0f});
  for (int t = 0; t < 16; ++t) {
    EXPECT_EQ(after[t], before[t]);
    EXPECT_EQ(after[57 + t], before[57 + t]);
    EXPECT_TRUE(std::isnan(after[19 + t]));
    EXPECT_FALSE(std::isfinite(after[38 + t]));
  }
}

// BitsNoise foretells how far the logits of quantised keys lie from the keys' own.
TEST_P(ScoreBits, NoiseIsTheVarianceOfWhatQuantisingDoesToLogits) {
  SCOPED_TRACE(random_.Trace());
  constexpr int kGroups = 40, kQueries = 3;
  const QuantisedGroup f{128, 2, 64};
  const PagedFixture keys(random_, DType::kBF16, kGroups * f.tokens, 16, f.dim);
  const QuantisedFixture rows(random_, keys, f, kGroups);
  const auto q = NormalFloats(random_, static_cast<size_t>(kQueries * f.dim));
  std::vector<float> noise(kQueries + 1, 7.0f);
  BitsNoise({rows.rows, kGroups, q.data(), kQueries, 0.1f, noise.data()});
  EXPECT_EQ(noise[kQueries], 7);
  const kvstrata::Run all{0, kGroups * f.tokens};
  const auto seen = Scores(ScoreBitsRef, {rows.rows, all, q.data(), kQueries, 0.1f});
  std::vector<float> exact(static_cast<size_t>(kQueries * all.end));
  const ScoreTokensWork work{keys.rows, all, q.data(), kQueries, 0.1f, exact.data(), all.end};
  ScoreTokensRef(&work, 1, InlineExecutor());
  for (int i = 0; i < kQueries; ++i) {
    double squares = 0;
    for (int t = 0; t < all.end; ++t) {
      const double off = seen[i * (all.end + 3) + t] - exact[i * all.end + t];
      squares += off * off;
    }
    // It looks at five of the forty groups, which differ.
    EXPECT_NEAR(noise[i], squares / all.end, 0.25 * squares / all.end);
  }
}

TEST_P(ScoreBits, NoiseIsOfTheLastGroupOfEveryEight) {
  SCOPED_TRACE(random_.Trace());
  const QuantisedGroup f{64, 3, 16};
  const PagedFixture keys(random_, DType::kBF16, 20 * f.tokens, 16, f.dim);
  const QuantisedFixture rows(random_, keys, f, 20);
  const auto q = NormalFloats(random_, static_cast<size_t>(f.dim));
  const auto expected = [&](const std::vector<int>& groups) {
    double sum = 0;
    for (int g : groups) {
      for (int c = 0; c < f.dim; ++c) {
        sum += std::pow(q[c] * StepOf(f, rows.rows.Group(g), c) * 0.5, 2) / 12;
      }
    }
    return groups.empty() ? 0 : sum / static_cast<double>(groups.size());
  };
  const std::map<int, std::vector<int>> cases = {{0, {}},   {1, {0}},      {7, {6}},     {8, {7}},
                                                 {15, {7}}, {16, {7, 15}}, {20, {7, 15}}};
  for (const auto& [groups, of] : cases) {
    float noise = kNaN;
    BitsNoise({rows.rows, groups, q.data(), 1, 0.5f, &noise});
    EXPECT_NEAR(noise, expected(of), 1e-5 * expected(of)) << groups;
  }
}

KVS_INSTANTIATE_SIMD(ScoreBits);

TEST(ScoreBitsDeathTest, RefusesGroupsThatHaveNoLayout) {
  std::byte block[64];
  std::byte* blocks[] = {block};
  float q[64] = {}, out[64];
  for (auto op : {ScoreBitsRef, ScoreBitsSimd}) {
    const ScoreBitsWork work{{{64, 2, 1}, blocks, 0, 1}, {0, 1}, q, 1, 1.0f, out, 64};
    EXPECT_DEATH(op(&work, 1, InlineExecutor()), "broken invariant");
  }
}

// ---- tests/golden ----

struct GoldenStep {
  GoldenBits bits;
  int n, layer, heads, kv_heads, dim;  // n: the tokens of step 0
  std::vector<float> q;                // [heads][dim]

  GoldenStep(const GoldenArrays& golden, int the_layer)
      : bits(GoldenBits::Of(golden)), layer(the_layer) {
    const GoldenArray &keys = golden.Get("keys_bf16", "<u2"),
                      &queries = golden.Get("queries_bf16", "<u2");
    const int64_t steps = golden.Get("entropy", "<f4").shape[0], layers = keys.shape[0];
    n = static_cast<int>(keys.shape[1] - steps + 1);
    kv_heads = static_cast<int>(keys.shape[2]), dim = static_cast<int>(keys.shape[3]);
    heads = static_cast<int>(queries.shape[2]);
    const int64_t row = (queries.shape[0] - steps) * layers + layer;
    for (int64_t i = 0; i < int64_t{heads} * dim; ++i) {
      q.push_back(ToFloat(BF16{queries.As<uint16_t>()[row * heads * dim + i]}));
    }
  }
  kvstrata::Run candidates() const { return {bits.n_sink, n - bits.n_recent}; }
  int sealed() const { return (n - 1) / bits.group * bits.group; }
};

// Logits [group][candidates] of one KV head: of sealed groups by their bits, of others by their
// keys.
std::vector<float> LogitsOf(const Backend& backend, const GoldenStep& step, const GoldenArray& keys,
                            int head) {
  const GoldenKeys rows(keys, step.layer, head);
  const QuantisedGroup f = step.bits.format(step.dim);
  std::vector<std::byte> memory(static_cast<size_t>(step.sealed() / f.tokens * f.bytes()));
  std::byte* block = memory.data();
  for (int g = 0; g < step.sealed() / f.tokens; ++g) {
    const QuantiseKeysWork work{rows.rows, g * f.tokens, f, block + g * f.bytes()};
    backend.quantise_keys(&work, 1, InlineExecutor());
  }
  const kvstrata::Run all = step.candidates();
  const int n = all.end - all.begin, queries = step.heads / step.kv_heads;
  const int split = std::min(step.sealed(), all.end);
  const float scale = 1 / std::sqrt(static_cast<float>(step.dim));
  const float* q = step.q.data() + head * queries * step.dim;
  std::vector<float> out(static_cast<size_t>(queries * n), kNaN);
  const ScoreBitsWork bits{
      {f, &block, 0, step.n}, {all.begin, split}, q, queries, scale, out.data(), n};
  backend.score_bits(&bits, 1, InlineExecutor());
  const ScoreTokensWork raw{
      rows.rows, {split, all.end}, q, queries, scale, out.data() + (split - all.begin), n};
  backend.score_tokens(&raw, 1, InlineExecutor());
  return out;
}

void ExpectGoldenStep(const Backend& backend, const GoldenArrays& golden, int layer) {
  const GoldenStep step(golden, layer);
  const std::string of_layer = "_layer" + std::to_string(layer);
  const float* want = golden.Get("bits.logits" + of_layer, "<f4").As<float>();
  const float* scores = golden.Get("bits.scores" + of_layer, "<f4").As<float>();
  const int n = step.candidates().end - step.candidates().begin;
  const int queries = step.heads / step.kv_heads;
  const bool exact = backend.name == "ref";
  for (int head = 0; head < step.kv_heads; ++head, want += queries * n, scores += n) {
    std::vector<float> got = LogitsOf(backend, step, golden.Get("keys_bf16", "<u2"), head);
    const std::vector<float> expected(want, want + queries * n);
    EXPECT_LE(RelativeL2(got, expected), exact ? 1e-6 : 1e-2);
    std::vector<float> max(queries), sum(queries), votes(n);
    backend.vote({got.data(), n, queries, n, max.data(), sum.data(), votes.data()},
                 InlineExecutor());
    EXPECT_LE(RelativeL2(votes, {scores, scores + n}), exact ? 1e-5 : 3e-2);
    std::vector<int32_t> mine(step.bits.budget), best(step.bits.budget);
    backend.top_k({votes.data(), n, step.bits.budget, mine.data()});
    TopKRef({scores, n, step.bits.budget, best.data()});
    std::vector<int32_t> shared;
    std::set_intersection(mine.begin(), mine.end(), best.begin(), best.end(),
                          std::back_inserter(shared));
    // Rounding queries to 8 bits may turn a near-tie: at most one token in 24.
    EXPECT_GE(shared.size(), best.size() - (exact ? 0 : best.size() / 24));
  }
}

TEST(ScoreBitsGolden, LogitsScoresAndChoice) {
  for (int seed = 1; seed <= 8; ++seed) {
    const GoldenArrays golden(KVS_GOLDEN "/case_00" + std::to_string(seed) + ".npz");
    ASSERT_TRUE(golden.Has("bits.logits_layer0")) << seed;
    for (const Backend& backend : Backends()) {
      for (int layer = 0; layer < golden.Get("keys_bf16", "<u2").shape[0]; ++layer) {
        SCOPED_TRACE(std::string(backend.name) + " seed " + std::to_string(seed));
        ExpectGoldenStep(backend, golden, layer);
      }
    }
  }
}

}  // namespace
}  // namespace kvstrata
