// SPDX-License-Identifier: Apache-2.0
// Selector `vote` against docs/spec/tokenselect.md in double precision.
#include "gmock/gmock.h"
#include "kernels/select/max_pool.h"
#include "tests/kernels/select_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 41;

Geometry SmallGeometry(int32_t kv_heads = 2, int32_t group = 2) {
  return {.layers = 2, .query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 64};
}

// A query [query_heads][dim] in double.
using Query = std::vector<Doubles>;

Query QueryOf(const Inputs& in, int32_t t, int layer) {
  Query q;
  for (int h = 0; h < in.g.query_heads; ++h) {
    q.emplace_back(in.Query(t, layer, h), in.Query(t, layer, h) + in.g.head_dim);
  }
  return q;
}

Doubles Votes(const Inputs& in, int layer, const Query& q, int32_t begin, int32_t end, bool scale) {
  Doubles votes(end - begin, 0.0);
  for (int h = 0; h < in.g.query_heads; ++h) {
    Doubles logits;
    for (int32_t t = begin; t < end; ++t) {
      const float* key = in.Key(t, layer, h / in.g.group());
      const double dot = std::inner_product(q[h].begin(), q[h].end(), key, 0.0);
      logits.push_back(scale ? dot / std::sqrt(in.g.head_dim) : dot);
    }
    const Doubles p = Softmax(logits);
    for (size_t t = 0; t < p.size(); ++t) votes[t] += p[t];
  }
  return votes;
}

double Cosine(const Doubles& a, const Doubles& b) {
  const double norms = std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0) *
                                 std::inner_product(b.begin(), b.end(), b.begin(), 0.0));
  return norms > 0 ? std::inner_product(a.begin(), a.end(), b.begin(), 0.0) / norms : 0;
}

double CosineOf(const Query& a, const Query& b, bool per_head) {
  Doubles flat_a, flat_b;
  double smallest = 2;
  for (size_t h = 0; h < a.size(); ++h) {
    smallest = std::min(smallest, Cosine(a[h], b[h]));
    flat_a.insert(flat_a.end(), a[h].begin(), a[h].end());
    flat_b.insert(flat_b.end(), b[h].begin(), b[h].end());
  }
  return per_head ? smallest : Cosine(flat_a, flat_b);
}

// One layer of docs/spec/tokenselect.md.
class VoteOracle {
 public:
  VoteOracle(const Inputs& in, const Plan& plan, int layer) : in_(in), p_(plan), layer_(layer) {}

  bool InFull(int32_t n) const {
    return n < p_.min_tokens || p_.vote.sinks + p_.vote.recent + p_.vote.budget >= n;
  }

  Ints Pick(const Query& q, int32_t end) {
    votes = Votes(in_, layer_, q, p_.vote.sinks, end, p_.vote.scale);
    const Doubles pooled = MaxPooled(votes, p_.vote.max_pool);
    stable = IsStable(pooled, p_.vote.budget) ||
             p_.vote.max_pool > 1;  // pooled scores tie, and ties are exact
    Ints tokens = TopK(pooled, p_.vote.budget);
    for (int32_t& t : tokens) t += p_.vote.sinks;
    return tokens;
  }

  // Positions attended by the step whose token is row n - 1.
  Ints Step(int32_t n) {
    hit = false;
    if (InFull(n)) return Upto(0, n);
    const Query q = QueryOf(in_, n - 1, layer_);
    const int32_t end = n - p_.vote.recent;
    if (!query_.empty() && p_.vote.theta < 1 &&
        CosineOf(q, query_, p_.vote.cosine_per_head) >= p_.vote.theta) {
      hit = true;
    } else {
      query_ = q, tokens_ = Pick(q, end), end_ = end;
    }
    Ints got = UnionOf(UnionOf(Upto(0, p_.vote.sinks), tokens_), Upto(end, n));
    return p_.vote.append_departed ? UnionOf(got, Upto(end_, end)) : got;
  }

  Doubles votes;
  bool hit = false, stable = true;

 private:
  const Inputs& in_;
  const Plan p_;
  const int layer_;
  Query query_;
  Ints tokens_;
  int32_t end_ = 0;
};

// Queries that turn slowly: some steps reuse the selection and some do not.
Inputs TurningInputs(const Geometry& g, int32_t n) {
  Inputs in(g, n, kSeed);
  const int64_t token = int64_t{g.layers} * g.query_heads * g.head_dim;
  for (int64_t i = token; i < n * token; ++i) {
    const float next = 0.9f * in.queries[i - token] + 0.44f * in.queries[i];
    in.queries[i] = ToFloat(FromFloat<BF16>(next));
  }
  return in;
}

class Vote : public EachBackend {};

constexpr const char* kPlans[] = {
    "k = 24, n_init = 4, n_local = 12, theta = 0.75",
    "k = 24, n_init = 4, n_local = 12, theta = 0.75, append_departed = true",
    "k = 24, n_init = 4, n_local = 12, theta = 0.65, cosine = 'head'",
    "k = 16, n_init = 0, n_local = 1, theta = 1, scale = false",
    "k = 16, n_init = 3, n_local = 5, theta = 0.6, max_pool = 4",
    "k = 16, n_init = 3, n_local = 5, theta = 0.6, max_pool = 5, min_tokens = 110"};

TEST_P(Vote, FollowsTheSpecificationStepByStep) {
  const Inputs in = TurningInputs(SmallGeometry(), 180);
  int skipped = 0, hits = 0, misses = 0;
  for (const std::string options : kPlans) {
    const bool min = options.find("min_tokens") != std::string::npos;
    Selecting s(in, "tokenselect{" + options + (min ? "}" : ", min_tokens = 0}"), backend());
    std::vector<VoteOracle> oracles = {{in, s.plan(), 0}, {in, s.plan(), 1}};
    s.Prompt(30);
    s.PrefillDone();
    bool lost = false;  // an unstable choice lives on in the cache
    for (int32_t n = 31; n <= in.n; ++n) {
      const auto got = s.Step();
      const auto flags = s.Array<uint8_t>("hits");
      for (int layer = 0; layer < 2; ++layer) {
        const Ints expected = oracles[layer].Step(n);
        ASSERT_EQ(flags[layer], oracles[layer].hit) << options << " n " << n << " layer " << layer;
        (oracles[layer].hit ? hits : misses) += 1;
        if (!oracles[layer].hit) lost = !oracles[layer].stable;
        ASSERT_EQ(got[layer].full, oracles[layer].InFull(n));
        ASSERT_EQ(got[layer].groups(), 1);
        if (lost) {
          ++skipped;
          continue;
        }
        ASSERT_EQ(PositionsOf(got[layer].runs[0]), expected)
            << "seed " << kSeed << " " << options << " n " << n << " layer " << layer;
      }
    }
    const auto votes = s.Array<float>("votes_layer1");
    ASSERT_EQ(votes.size(), oracles[1].votes.size()) << options;
    for (size_t t = 0; t < votes.size(); ++t) {
      ASSERT_NEAR(votes[t], oracles[1].votes[t], 1e-4 * oracles[1].votes[t] + 1e-7);
    }
  }
  EXPECT_GT(hits, 100);
  EXPECT_GT(misses, 100);
  EXPECT_LT(skipped, 20);
}

TEST_P(Vote, AChunkIsSelectedByItsMeanQueryAndLeavesTheCacheAlone) {
  const Inputs in = TurningInputs(SmallGeometry(2, 3), 120);
  Selecting s(in, "tokenselect{k = 20, n_init = 4, n_local = 8, theta = 0, min_tokens = 0}",
              backend());
  VoteOracle oracle(in, s.plan(), 1);
  Selection out;
  s.Prompt(32);
  EXPECT_FALSE(s.SelectChunk(1, 16, &out)) << "4 + 20 + 8 tokens are all there are";
  s.Prompt(80);
  ASSERT_TRUE(s.SelectChunk(1, 16, &out));
  Query mean = QueryOf(in, 80, 1);
  for (int32_t t = 81; t < 96; ++t) {
    const Query q = QueryOf(in, t, 1);
    for (size_t h = 0; h < q.size(); ++h) {
      for (size_t c = 0; c < q[h].size(); ++c) mean[h][c] += q[h][c];
    }
  }
  for (Doubles& head : mean) {
    for (double& x : head) x /= 16;
  }
  const Ints chosen = oracle.Pick(mean, 80 - 8);
  ASSERT_TRUE(oracle.stable) << "choose another seed";
  EXPECT_EQ(PositionsOf(out.runs[0]), UnionOf(UnionOf(Upto(0, 4), chosen), Upto(72, 80)));
  EXPECT_FALSE(out.full);
  // theta = 0 would reuse any cached selection; the first decode step finds none.
  s.Prompt(96);
  s.PrefillDone();
  s.Step();
  EXPECT_EQ(s.Array<uint8_t>("hits"), (std::vector<uint8_t>{0, 0}));
  s.Step();
  EXPECT_EQ(s.Array<uint8_t>("hits"), (std::vector<uint8_t>{1, 1}));
}

TEST_P(Vote, AnAbortedStepChangesNothing) {
  const Inputs in = TurningInputs(SmallGeometry(), 90);
  const std::string plan =
      "tokenselect{k = 20, n_init = 4, n_local = 8, theta = 0.8, min_tokens = 0}";
  Selecting steady(in, plan, backend()), shaky(in, plan, backend());
  for (Selecting* s : {&steady, &shaky}) {
    s->Prompt(60);
    s->PrefillDone();
  }
  for (int i = 0; i < 25; ++i) {
    shaky.Begin();
    shaky.Select(0);
    if (i % 2 == 0) shaky.Select(1);
    Selecting fork(shaky);  // taken inside the open step: as if there were none
    const auto expected = steady.Step();
    const auto again = shaky.Step(), forked = fork.Step();
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_EQ(again[layer].runs, expected[layer].runs) << i;
      ASSERT_EQ(forked[layer].runs, expected[layer].runs) << i;
    }
  }
}

TEST_P(Vote, OneHeadThatFlipsIsSeenPerHeadOnly) {
  Inputs in(SmallGeometry(8, 4), 70, kSeed);
  const int64_t token = int64_t{2} * 32 * 64;
  for (int64_t i = 60 * token; i < 61 * token; ++i) {
    in.queries[i + token] = i % (32 * 64) < 64 ? -in.queries[i] : in.queries[i];
  }
  for (const bool per_head : {false, true}) {
    Selecting s(
        in,
        std::string("tokenselect{k = 20, n_init = 4, n_local = 8, min_tokens = 0, cosine = '") +
            (per_head ? "head'}" : "flat'}"),
        backend());
    s.Prompt(60);
    s.PrefillDone();
    s.Step();
    s.Step();
    EXPECT_EQ(s.Array<uint8_t>("hits")[0], per_head ? 0 : 1);
  }
}

TEST_P(Vote, TiesGoToTheLowerTokenAndZeroQueriesNeverReuse) {
  Inputs in(SmallGeometry(), 60, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  std::fill(in.queries.begin(), in.queries.end(), 0.0f);
  Selecting s(in, "tokenselect{k = 5, n_init = 2, n_local = 3, theta = 0.1, min_tokens = 0}",
              backend());
  s.Prompt(50);
  s.PrefillDone();
  for (int i = 0; i < 3; ++i) {
    const Selection got = s.Step()[1];
    EXPECT_EQ(PositionsOf(got.runs[0]), UnionOf(Upto(0, 7), Upto(s.tokens() - 3, s.tokens())));
    EXPECT_EQ(s.Array<uint8_t>("hits")[1], 0);
  }
}

TEST_P(Vote, UnknownArraysNameWhatThereIs) {
  const Inputs in(SmallGeometry(), 20, kSeed);
  Selecting s(in, "tokenselect", backend());
  s.Prompt(20);
  EXPECT_THAT(s.Inspect("voices").status().message(), ::testing::HasSubstr("votes_layerI"));
  EXPECT_EQ(s.Inspect("votes_layer2").status().reason(), "INSPECT_UNKNOWN");
  EXPECT_EQ(s.StatusText(), "");
}

KVS_FOR_EACH_BACKEND(Vote);

TEST(MaxPool, IsTheMaximumOfTheWindow) {
  std::mt19937_64 random(kSeed);
  std::vector<float> scratch;
  for (int i = 0; i < 400; ++i) {
    const int n = static_cast<int>(random() % 40), width = 1 + static_cast<int>(random() % 50);
    std::vector<float> x(n);
    for (float& v : x) v = static_cast<float>(random() % 1000);
    const Doubles expected = MaxPooled({x.begin(), x.end()}, width);
    MaxPool(width, x.data(), n, &scratch);
    ASSERT_EQ(Doubles(x.begin(), x.end()), expected) << "seed " << kSeed << " case " << i;
  }
}

}  // namespace
}  // namespace kvstrata
