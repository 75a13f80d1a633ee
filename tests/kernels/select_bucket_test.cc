// SPDX-License-Identifier: Apache-2.0
// Selector `bucket` against docs/spec/sentencekv.md in double precision.
#include "gmock/gmock.h"
#include "kernels/select/sentence_queries.h"
#include "tests/kernels/select_fixture.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 61;

Geometry SmallGeometry(int32_t kv_heads = 2, int32_t group = 2) {
  return {.layers = 2, .query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 64};
}

struct OracleBucket {
  Ints tokens;
  Doubles mean;
};

// One layer of docs/spec/sentencekv.md, written from its text.
class BucketOracle {
 public:
  BucketOracle(const Inputs& in, const Plan& plan, int layer)
      : in_(in),
        p_(plan),
        layer_(layer),
        group_(plan.bucket.per_query_head ? 1 : in.g.group()),
        rows_(in.g.query_heads / group_) {}

  void Prefill(int32_t n, const std::vector<uint8_t>& boundary) {
    n_ = sentence_ = n;
    kept_.assign(rows_, std::vector<bool>(n, true));
    buckets_.assign(rows_, {});
    if (!InFull(n)) Keep();
    for (auto& row : kept_) std::fill_n(row.begin(), std::min(p_.bucket.sinks, n), false);
    int32_t begin = 0;
    for (int32_t t = 0; t < n; ++t) {
      if (!boundary[t] && t + 1 - begin != p_.bucket.max_length && t + 1 != n) continue;
      AddBuckets(begin, t + 1);
      begin = t + 1;
    }
  }

  // The positions that each row attends in the step of token n_, which is then appended.
  std::vector<Ints> Step(bool ends) {
    const int32_t n = ++n_;
    for (auto& row : kept_) row.push_back(true);
    queries_.push_back(n - 1);
    stable.assign(rows_, true);
    std::vector<Ints> got(rows_, Upto(0, n));
    if (!InFull(n)) {
      for (int row = 0; row < rows_; ++row) got[row] = Fill(row, n);
    }
    if (ends || static_cast<int32_t>(queries_.size()) == p_.bucket.max_length) {
      AddBuckets(sentence_, n);
      queries_.clear();
      sentence_ = n;
    }
    return got;
  }

  bool InFull(int32_t n) const {
    return n < p_.min_tokens || p_.bucket.sinks + p_.bucket.recent + p_.bucket.budget >= n;
  }
  int rows() const { return rows_; }
  Ints Kept(int row) const {
    Ints kept;
    for (int32_t t = 0; t < static_cast<int32_t>(kept_[row].size()); ++t) {
      if (kept_[row][t]) kept.push_back(t);
    }
    return kept;
  }
  const std::vector<OracleBucket>& Buckets(int row) const { return buckets_[row]; }

  std::vector<Doubles> importance;  // [rows]
  bool kept_stable = true;
  std::vector<bool> stable;
  std::vector<Ints> units;

 private:
  int KvOf(int row) const { return row * group_ / in_.g.group(); }

  void Keep() {
    const int32_t w = std::min(p_.bucket.n_obs, n_), before = n_ - w;
    importance.clear();
    for (int row = 0; row < rows_; ++row) {
      Doubles a(before, 0.0);
      for (int32_t t = before; t < n_; ++t) {
        for (int h = row * group_; h < (row + 1) * group_; ++h) {
          Doubles logits;
          for (int32_t s = 0; s <= t; ++s) {
            logits.push_back(Dot(in_.Query(t, layer_, h), in_.Key(s, layer_, KvOf(row)), 64) / 8);
          }
          const Doubles p = Softmax(logits);
          for (int32_t s = 0; s < before; ++s) a[s] += p[s];
        }
      }
      importance.push_back(MaxPooled(a, p_.bucket.pool));
      const Doubles candidates(importance[row].begin() + std::min(p_.bucket.sinks, before),
                               importance[row].end());
      const auto k = static_cast<int32_t>(std::floor(p_.bucket.r * p_.bucket.budget + 1e-9));
      if (p_.bucket.pool == 1) kept_stable = kept_stable && IsStable(candidates, k);
      std::fill_n(kept_[row].begin(), before, false);
      for (const int32_t i : TopK(candidates, k)) kept_[row][p_.bucket.sinks + i] = true;
    }
  }

  void AddBuckets(int32_t first, int32_t stop) {
    for (int row = 0; row < rows_; ++row) {
      Ints whole = Upto(std::max(first, p_.bucket.sinks), stop), kept;
      for (const int32_t t : whole) {
        if (kept_[row][t]) kept.push_back(t);
      }
      const Ints tokens = p_.bucket.keep_rest ? whole : kept;
      if (tokens.empty()) continue;
      const Ints& of = kept.empty() ? tokens : kept;
      Doubles mean(64, 0.0);
      for (const int32_t t : of) {
        for (int c = 0; c < 64; ++c)
          mean[c] += in_.Key(t, layer_, KvOf(row))[c] / double(of.size());
      }
      buckets_[row].push_back({tokens, mean});
    }
  }

  Ints Fill(int row, int32_t n) {
    const int32_t window = std::min(n - p_.bucket.recent, sentence_);
    Doubles q(64, 0.0), scores;
    for (const int32_t t : queries_) {
      for (int h = row * group_; h < (row + 1) * group_; ++h) {
        for (int c = 0; c < 64; ++c) {
          q[c] += in_.Query(t, layer_, h)[c] / double(queries_.size() * group_);
        }
      }
    }
    for (const OracleBucket& b : buckets_[row]) {
      scores.push_back(std::inner_product(q.begin(), q.end(), b.mean.begin(), 0.0));
    }
    Ints tokens = UnionOf(Upto(0, p_.bucket.sinks), Upto(window, n));
    if (static_cast<int>(units.size()) <= row) units.resize(row + 1);
    units[row].clear();
    int32_t room = p_.bucket.budget;
    double last = INFINITY, largest = 1e-30;
    for (const double s : scores) largest = std::max(largest, std::abs(s));
    for (const int32_t b : Ranking(scores)) {
      Ints mine;
      for (const int32_t t : buckets_[row][b].tokens) {
        if (t < window && static_cast<int32_t>(mine.size()) < room) mine.push_back(t);
      }
      if (mine.empty()) continue;
      if (last - scores[b] < 1e-5 * largest) stable[row] = false;
      last = scores[b];
      tokens = UnionOf(tokens, mine);
      units[row].push_back(b);
      room -= static_cast<int32_t>(mine.size());
    }
    std::sort(units[row].begin(), units[row].end());
    return tokens;
  }

  const Inputs& in_;
  const Plan p_;
  const int layer_, group_, rows_;
  int32_t n_ = 0, sentence_ = 0;
  std::vector<std::vector<bool>> kept_;
  std::vector<std::vector<OracleBucket>> buckets_;
  Ints queries_;
};

// Ends of sentences: irregular, some next to each other, one gap that only max_length closes.
std::vector<uint8_t> Boundaries(int32_t n) {
  std::vector<uint8_t> boundary(n);
  for (int32_t t = 0; t < n; ++t) boundary[t] = t % 11 == 6 || t % 17 == 3 || t % 34 == 4;
  for (int32_t t = 40; t < std::min(n, 90); ++t) boundary[t] = 0;
  return boundary;
}

constexpr const char* kPlans[] = {
    "tau = 24, r = 2, n_obs = 8, start = 4, recent = 6, pool = 1, max_length = 20",
    "tau = 24, r = 2, n_obs = 8, start = 4, recent = 6, pool = 7, max_length = 20",
    "tau = 30, r = 1.5, n_obs = 5, start = 0, recent = 1, pool = 4, max_length = 40, "
    "per_query_head = true",
    "tau = 24, r = 1, n_obs = 8, start = 4, recent = 6, pool = 3, max_length = 13, keep_rest = "
    "true",
    "tau = 3, r = 8, n_obs = 200, start = 20, recent = 40, pool = 1, max_length = 7",
    "tau = 60, r = 2, n_obs = 8, start = 4, recent = 6, pool = 1, max_length = 20, "
    "min_tokens = 170",
    "tau = 0, r = 2, n_obs = 8, start = 4, recent = 6, pool = 1"};

std::string TextOf(const std::string& options) {
  const bool min = options.find("min_tokens") != std::string::npos;
  return "sentencekv{" + options + (min ? "}" : ", min_tokens = 0}");
}

class Bucket : public EachBackend {
 protected:
  void CheckPrompt(Selecting& s, const std::vector<BucketOracle>& oracles) {
    const auto kept = s.Array<int32_t>("kept"), offsets = s.Array<int32_t>("kept_offsets");
    const auto sizes = s.Array<int32_t>("bucket_sizes");
    const auto means = s.Array<float>("bucket_means");
    const auto importance = s.Array<float>("importance");
    Ints expected_kept, expected_offsets = {0}, expected_sizes;
    Doubles expected_means, expected_importance;
    for (const BucketOracle& o : oracles) {
      for (const Doubles& row : o.importance) {
        expected_importance.insert(expected_importance.end(), row.begin(), row.end());
      }
      for (int row = 0; row < o.rows(); ++row) {
        const Ints own = o.Kept(row);
        expected_kept.insert(expected_kept.end(), own.begin(), own.end());
        expected_offsets.push_back(static_cast<int32_t>(expected_kept.size()));
        for (const OracleBucket& b : o.Buckets(row)) {
          expected_sizes.push_back(static_cast<int32_t>(b.tokens.size()));
          expected_means.insert(expected_means.end(), b.mean.begin(), b.mean.end());
        }
      }
    }
    ASSERT_EQ(importance.size(), expected_importance.size());
    for (size_t t = 0; t < importance.size(); ++t) {
      ASSERT_NEAR(importance[t], expected_importance[t], 1e-4 * expected_importance[t] + 1e-9);
    }
    ASSERT_EQ(kept, expected_kept);
    ASSERT_EQ(offsets, expected_offsets);
    ASSERT_EQ(sizes, expected_sizes);
    ASSERT_EQ(means.size(), expected_means.size());
    for (size_t i = 0; i < means.size(); ++i) ASSERT_NEAR(means[i], expected_means[i], 1e-5);
  }
};

TEST_P(Bucket, FollowsTheSpecificationStepByStep) {
  const Inputs in(SmallGeometry(), 260, kSeed);
  int skipped = 0, counted = 0;
  for (const std::string options : kPlans) {
    for (const int32_t prompt : {1, 33, 140}) {
      SCOPED_TRACE(options + " prompt " + std::to_string(prompt));
      Selecting s(in, TextOf(options), backend());
      s.boundary = Boundaries(in.n);
      std::vector<BucketOracle> oracles = {{in, s.plan(), 0}, {in, s.plan(), 1}};
      s.Prompt(prompt, 19);
      s.PrefillDone();
      for (BucketOracle& o : oracles) o.Prefill(prompt, s.boundary);
      ASSERT_TRUE(oracles[0].kept_stable && oracles[1].kept_stable) << "choose another seed";
      ASSERT_NO_FATAL_FAILURE(CheckPrompt(s, oracles));
      EXPECT_EQ(s.StatusText(), "");
      for (int32_t n = prompt + 1; n <= in.n; ++n) {
        const auto got = s.Step();
        for (int layer = 0; layer < 2; ++layer) {
          BucketOracle& o = oracles[layer];
          const auto expected = o.Step(s.boundary[n - 1] != 0);
          ASSERT_EQ(got[layer].full, o.InFull(n)) << n;
          for (int row = 0; row < got[layer].groups(); ++row) {
            ++counted;
            if (!o.stable[row]) {
              ++skipped;
              continue;
            }
            ASSERT_EQ(PositionsOf(got[layer].runs[row]), expected[row])
                << "seed " << kSeed << " n " << n << " layer " << layer << " row " << row;
            if (!got[layer].full) {
              ASSERT_EQ(got[layer].units[row], o.units[row]) << n;
            }
          }
        }
      }
    }
  }
  EXPECT_LT(skipped, counted / 50);
}

TEST_P(Bucket, PromptsInChunksKeepTheSame) {
  const Inputs in(SmallGeometry(), 120, kSeed);
  std::vector<std::vector<int32_t>> kept;
  for (const int32_t chunk : {1, 7, 64, 120}) {
    Selecting s(in, TextOf(kPlans[1]), backend());
    s.boundary = Boundaries(in.n);
    s.Prompt(119, chunk);
    s.PrefillDone();
    kept.push_back(s.Array<int32_t>("kept"));
    EXPECT_EQ(kept.back(), kept.front()) << chunk;
  }
  EXPECT_FALSE(kept[0].empty());
}

TEST_P(Bucket, AnAbortedStepChangesNothing) {
  const Inputs in(SmallGeometry(), 160, kSeed);
  Selecting steady(in, TextOf(kPlans[0]), backend()), shaky(in, TextOf(kPlans[0]), backend());
  for (Selecting* s : {&steady, &shaky}) {
    s->boundary = Boundaries(in.n);
    s->Prompt(100);
    s->PrefillDone();
  }
  while (steady.tokens() < in.n) {
    shaky.Begin();
    shaky.Select(0);
    if (steady.tokens() % 3 == 0) shaky.Select(1);
    Selecting fork(shaky);
    const auto expected = steady.Step();
    const auto again = shaky.Step(), forked = fork.Step();
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_EQ(again[layer].runs, expected[layer].runs) << steady.tokens();
      ASSERT_EQ(forked[layer].runs, expected[layer].runs) << steady.tokens();
    }
  }
}

TEST_P(Bucket, WithoutItsInputsItAttendsInFullAndSaysSo) {
  const Inputs in(SmallGeometry(), 160, kSeed);
  Selecting s(in, TextOf(kPlans[0]), backend());
  s.boundary = Boundaries(in.n);
  s.reported_boundaries = 99;
  s.Prompt(100);
  EXPECT_EQ(s.StatusText(), "");
  s.PrefillDone();
  EXPECT_THAT(s.StatusText(), HasSubstr("99 of the prompt's 100 tokens"));
  EXPECT_TRUE(s.Step()[0].full);
  EXPECT_TRUE(s.Step()[1].full);
  // The missing ones arrive: from then on as if they had been there.
  s.reported_boundaries = SIZE_MAX;
  EXPECT_FALSE(s.Step()[0].full);
  EXPECT_EQ(s.StatusText(), "");
  // Boundaries of the prompt only: generated sentences end by their length.
  Selecting prompt_only(in, TextOf(kPlans[0]), backend());
  prompt_only.boundary = Boundaries(in.n);
  prompt_only.reported_boundaries = 100;
  prompt_only.Prompt(100);
  prompt_only.PrefillDone();
  const size_t before = prompt_only.Array<int32_t>("bucket_sizes").size();
  while (prompt_only.tokens() < 121) prompt_only.Step();
  EXPECT_EQ(prompt_only.Array<int32_t>("bucket_sizes").size(), before + 4);
  EXPECT_THAT(prompt_only.StatusText(), HasSubstr("ends every 20 tokens"));
}

// A prefix hit skips tokens, hence their queries.
TEST_P(Bucket, QueriesThatNobodySawAreMissed) {
  const Inputs in(SmallGeometry(), 120, kSeed);
  for (const int32_t seen : {7, 8}) {
    Selecting s(in, TextOf(kPlans[0]), backend());
    s.boundary = Boundaries(in.n);
    s.Skip(100 - seen);
    s.Prompt(100);
    s.PrefillDone();
    EXPECT_EQ(s.Step()[0].full, seen < 8);
    EXPECT_EQ(s.StatusText().find("the prompt's last 8 tokens") != std::string::npos, seen < 8);
  }
}

TEST_P(Bucket, EveryTokenASentenceAndEqualKeys) {
  Inputs in(SmallGeometry(), 90, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  Selecting s(in, "sentencekv{tau = 5, n_obs = 4, start = 2, recent = 3, min_tokens = 0}",
              backend());
  s.boundary.assign(in.n, 1);
  s.Prompt(60);
  s.PrefillDone();
  for (int i = 0; i < 20; ++i) {
    const Selection got = s.Step()[0];
    const int32_t n = s.tokens();
    // Ties go to the earlier sentence: tokens 2 .. 6.
    ASSERT_EQ(PositionsOf(got.runs[1]), UnionOf(Upto(0, 7), Upto(n - 3, n)));
    ASSERT_EQ(got.units[1], Upto(0, 5));
  }
}

KVS_FOR_EACH_BACKEND(Bucket);

TEST(SentenceQueries, ALateBoundaryEndsItsSentenceLate) {
  const Geometry g = SmallGeometry();
  SentenceQueries queries(g, 10);
  std::vector<float> q(4 * 64, 1.0f), mean(2 * 64);
  queries.Start(5);
  std::vector<uint8_t> boundary(6);
  for (int32_t tokens = 5; tokens < 8; ++tokens) {
    EXPECT_TRUE(queries.Close(boundary, tokens).empty());
    queries.Mean(0, tokens, q.data(), 2, mean.data());
    queries.Advance();
    for (float& x : q) x += 1;
  }
  EXPECT_EQ(mean[0], 2);
  boundary = {0, 0, 0, 0, 0, 0, 1};
  const auto ended = queries.Close(boundary, 8);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0], (kvstrata::Run{5, 7}));
  EXPECT_EQ(queries.begin(), 7);
  queries.Mean(0, 8, q.data(), 2, mean.data());
  EXPECT_EQ(mean[0], 4);
}

}  // namespace
}  // namespace kvstrata
