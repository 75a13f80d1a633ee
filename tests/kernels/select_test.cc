// SPDX-License-Identifier: Apache-2.0
// Selections against oracles written from docs/spec/README.md and docs/spec/chess.md in plain
// double precision, and the rules that every selector obeys.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "gmock/gmock.h"
#include "kernels/select/selector.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using Ints = std::vector<int32_t>;

constexpr uint64_t kSeed = 31;

Geometry SmallGeometry(int32_t kv_heads = 2, int32_t group = 2) {
  return {.layers = 2, .query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 64};
}

// --- oracles ---

// Indices of the k largest, ties to the lower index, ascending.
Ints TopK(const std::vector<double>& scores, int32_t k) {
  Ints order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  order.resize(std::min<size_t>(order.size(), std::max(k, 0)));
  std::sort(order.begin(), order.end());
  return order;
}

// Whether the k-th and the next score differ by more than fp32 noise.
bool IsStable(std::vector<double> scores, int32_t k) {
  if (k <= 0 || k >= static_cast<int32_t>(scores.size())) return true;
  std::sort(scores.rbegin(), scores.rend());
  const double largest = std::max(std::abs(scores.front()), std::abs(scores.back()));
  return scores[k - 1] - scores[k] > 1e-5 * largest;
}

Ints PositionsOfUnits(const Ints& units, int32_t size, int32_t n) {
  Ints positions;
  for (const int32_t u : units) {
    for (int32_t t = u * size; t < std::min((u + 1) * size, n); ++t) positions.push_back(t);
  }
  return positions;
}

Ints UnionOf(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

Ints Upto(int32_t begin, int32_t end) {
  Ints range;
  for (int32_t i = std::max(begin, 0); i < end; ++i) range.push_back(i);
  return range;
}

// Quest's page scores of one layer and KV head.
std::vector<double> QuestScores(const Inputs& in, int32_t n, int32_t page, int layer, int head) {
  std::vector<double> scores;
  for (int32_t begin = 0; begin < n; begin += page) {
    double best = -INFINITY;
    for (int g = 0; g < in.g.group(); ++g) {
      const float* q = in.Query(n - 1, layer, head * in.g.group() + g);
      double sum = 0;
      for (int c = 0; c < in.g.head_dim; ++c) {
        double low = INFINITY, high = -INFINITY;
        for (int32_t t = begin; t < std::min(begin + page, n); ++t) {
          low = std::min<double>(low, in.Key(t, layer, head)[c]);
          high = std::max<double>(high, in.Key(t, layer, head)[c]);
        }
        sum += std::max(q[c] * low, q[c] * high);
      }
      best = std::max(best, sum);
    }
    scores.push_back(best);
  }
  return scores;
}

// The same by score = "deviation", by the definition of variance and by group = "softmax" or "max".
std::vector<double> DeviationScores(const Inputs& in, int32_t page, kvstrata::Run pages, int32_t n,
                                    int layer, int head, bool softmax) {
  std::vector<double> scores(pages.end - pages.begin, softmax ? 0 : -INFINITY);
  for (int g = 0; g < in.g.group(); ++g) {
    const float* q = in.Query(n - 1, layer, head * in.g.group() + g);
    std::vector<double> own;
    for (int32_t begin = pages.begin * page; begin < pages.end * page; begin += page) {
      double sum = 0, variance = 0;
      for (int c = 0; c < in.g.head_dim; ++c) {
        double first = 0, second = 0;
        for (int32_t t = begin; t < begin + page; ++t) {
          first += in.Key(t, layer, head)[c] / page;
          second += std::pow(in.Key(t, layer, head)[c], 2) / page;
        }
        sum += q[c] * first;
        variance += q[c] * q[c] * (second - first * first);
      }
      own.push_back(sum + 2 * std::sqrt(variance));
    }
    if (softmax) {
      double total = 0;
      for (double& x : own) total += x = std::exp(in.g.logit_scale() * x);
      for (double& x : own) x /= total;
    }
    for (size_t i = 0; i < own.size(); ++i) {
      scores[i] = softmax ? scores[i] + own[i] : std::max(scores[i], own[i]);
    }
  }
  return scores;
}

// CHESS as docs/spec/chess.md tells it, token by token; all layers and heads in one vector.
class ChessOracle {
 public:
  ChessOracle(const Inputs& in, const Plan& plan) : in_(in), p_(plan) {}

  void Append(double entropy) {
    ++n_;
    entropies_.push_back(entropy);
    bool due = false;
    if (n_ % p_.index.unit == 0) {
      pages_.push_back(Rounded(MeanOfTokens(n_ - p_.index.unit, n_)));
      ++since_;
      due = IsDue();
      entropies_.clear();
    }
    if (decoding_ && (due || p_.cascade.trigger == CascadeOptions::Trigger::kAlways)) Select();
  }
  void FinishPrefill() {
    decoding_ = true;
    Select();
  }

  Ints Table(int32_t n) const {
    const int32_t pages = (n + p_.index.unit - 1) / p_.index.unit;
    return UnionOf(UnionOf(Upto(0, std::min(p_.cascade.sinks, pages)), Upto(window_start_, pages)),
                   selected_);
  }

  int32_t selections = 0;
  bool stable = true;
  std::array<std::vector<double>, 3> scores;  // pages, chunks, grids

 private:
  using Vector = std::vector<float>;

  Vector TokenVector(int32_t t) const {
    Vector v;
    for (int layer = 0; layer < in_.g.layers; ++layer) {
      for (int head = 0; head < in_.g.kv_heads; ++head) {
        v.insert(v.end(), in_.Key(t, layer, head), in_.Key(t, layer, head) + in_.g.head_dim);
      }
    }
    return v;
  }
  static Vector MeanOf(const std::vector<Vector>& rows) {
    Vector mean(rows[0].size(), 0.0f);
    for (const Vector& row : rows) {
      for (size_t c = 0; c < row.size(); ++c) mean[c] += row[c];
    }
    for (float& x : mean) x /= static_cast<float>(rows.size());
    return mean;
  }
  static Vector Rounded(Vector v) {
    for (float& x : v) x = ToFloat(FromFloat<BF16>(x));
    return v;
  }
  Vector MeanOfTokens(int32_t begin, int32_t end) const {
    std::vector<Vector> rows;
    for (int32_t t = begin; t < end; ++t) rows.push_back(TokenVector(t));
    return MeanOf(rows);
  }
  static std::vector<Vector> Centroids(const std::vector<Vector>& rows, int32_t size) {
    std::vector<Vector> means;
    for (size_t i = 0; i < rows.size(); i += size) {
      means.push_back(
          Rounded(MeanOf({rows.begin() + i,
                          rows.begin() + std::min(rows.size(), i + static_cast<size_t>(size))})));
    }
    return means;
  }

  bool IsDue() const {
    std::vector<double> given;
    for (const double e : entropies_) {
      if (!std::isnan(e)) given.push_back(e);
    }
    if (p_.cascade.trigger == CascadeOptions::Trigger::kEvery || given.empty())
      return since_ >= p_.cascade.every;
    const double mean = std::accumulate(given.begin(), given.end(), 0.0) / given.size();
    double variance = 0;
    for (const double e : given) variance += (e - mean) * (e - mean) / given.size();
    const bool a = mean > p_.cascade.thresholds[0], b = variance > p_.cascade.thresholds[1];
    return p_.cascade.trigger_or ? a || b : a && b;
  }

  void Select() {
    std::vector<Vector> vectors = pages_;
    if (n_ % p_.index.unit != 0) vectors.push_back(MeanOfTokens(n_ - n_ % p_.index.unit, n_));
    window_start_ = std::max<int32_t>(0, static_cast<int32_t>(vectors.size()) - p_.cascade.recent);
    since_ = 0;
    ++selections;
    if (pages_.empty()) return;
    const Vector anchor = MeanOf({vectors.begin() + window_start_, vectors.end()});
    const auto chunks = Centroids(pages_, p_.index.pages_per_chunk);
    const auto grids = Centroids(chunks, p_.index.chunks_per_grid);
    Vector mean(anchor.size(), 0.0f);
    if (p_.cascade.centred) mean = MeanOf(pages_);
    scores = {Dots(pages_, anchor, mean), Dots(chunks, anchor, mean), Dots(grids, anchor, mean)};
    stable = true;
    const Ints candidates = Upto(std::min(p_.cascade.sinks, window_start_), window_start_);
    selected_ =
        p_.cascade.pruning == CascadeOptions::Pruning::kTop ? Top(candidates) : Literal(candidates);
  }

  static std::vector<double> Dots(const std::vector<Vector>& rows, const Vector& anchor,
                                  const Vector& mean) {
    std::vector<double> dots;
    for (const Vector& row : rows) {
      double sum = 0;
      for (size_t c = 0; c < row.size(); ++c) {
        sum += (double{row[c]} - mean[c]) * (double{anchor[c]} - mean[c]);
      }
      dots.push_back(sum);
    }
    return dots;
  }

  Ints Best(const Ints& units, int level, double share) {
    if (units.empty()) return {};
    std::vector<double> own;
    for (const int32_t u : units) own.push_back(scores[level][u]);
    const auto n = static_cast<double>(units.size());
    const auto k = static_cast<int32_t>(std::clamp(std::ceil(share * n - 1e-9), 1.0, n));
    stable = stable && IsStable(own, k);
    Ints best;
    for (const int32_t i : TopK(own, k)) best.push_back(units[i]);
    return best;
  }

  Ints Top(const Ints& candidates) {
    const auto chunk = [&](int32_t page) { return page / p_.index.pages_per_chunk; };
    const auto grid = [&](int32_t c) { return c / p_.index.chunks_per_grid; };
    Ints chunks, grids;
    for (const int32_t page : candidates) chunks = UnionOf(chunks, {chunk(page)});
    for (const int32_t c : chunks) grids = UnionOf(grids, {grid(c)});
    const auto among = [](const Ints& units, const auto& parent, const Ints& kept) {
      Ints children;
      for (const int32_t u : units) {
        if (std::binary_search(kept.begin(), kept.end(), parent(u))) children.push_back(u);
      }
      return children;
    };
    grids = Best(grids, 2, p_.cascade.rho[0]);
    chunks = Best(among(chunks, grid, grids), 1, p_.cascade.rho[1]);
    return Best(among(candidates, chunk, chunks), 0, p_.cascade.rho[2]);
  }

  Ints Literal(const Ints& candidates) {
    std::vector<bool> parent;
    for (int level = 2; level >= 0; --level) {
      const int32_t size = level == 1 ? p_.index.chunks_per_grid : p_.index.pages_per_chunk;
      std::vector<double> shown = scores[level];
      for (size_t u = 0; level < 2 && u < shown.size(); ++u) {
        if (!parent[u / size]) shown[u] = 0;
      }
      std::vector<double> sorted = shown;
      std::sort(sorted.begin(), sorted.end());
      const double at = (1 - p_.cascade.rho[2 - level]) * (sorted.size() - 1);
      const auto low = static_cast<size_t>(at);
      const size_t high = std::min(low + 1, sorted.size() - 1);
      const double threshold = sorted[low] + (at - low) * (sorted[high] - sorted[low]);
      std::vector<bool> kept(shown.size());
      for (size_t u = 0; u < shown.size(); ++u) {
        kept[u] = scores[level][u] >= threshold && (level == 2 || parent[u / size]);
        stable = stable && std::abs(scores[level][u] - threshold) > 1e-6 * std::abs(threshold);
      }
      parent = kept;
    }
    Ints selected;
    for (const int32_t page : candidates) {
      if (parent[page]) selected.push_back(page);
    }
    return selected;
  }

  const Inputs& in_;
  const Plan p_;
  int32_t n_ = 0, window_start_ = 0, since_ = 0;
  bool decoding_ = false;
  std::vector<Vector> pages_;
  std::vector<double> entropies_;
  Ints selected_;
};

// --- runs ---

using RunList = std::vector<Run>;  // a test's own Run is GoogleTest's

RunList RandomRuns(std::mt19937_64& random, std::vector<bool>* covered) {
  RunList runs(random() % 8);
  for (auto& r : runs) {
    r = {static_cast<int32_t>(random() % 64), static_cast<int32_t>(random() % 64)};
    for (int32_t t = r.begin; t < r.end; ++t) (*covered)[t] = true;
  }
  return runs;
}

TEST(Normalize, IsTheUnion) {
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 500; ++i) {
    std::vector<bool> in(64);
    const RunList got = Normalize(RandomRuns(random, &in));
    Ints expected;
    for (int32_t t = 0; t < 64; ++t) {
      if (in[t]) expected.push_back(t);
    }
    ASSERT_EQ(PositionsOf(got), expected) << "seed " << kSeed << " case " << i;
    for (size_t r = 1; r < got.size(); ++r) ASSERT_LT(got[r - 1].end, got[r].begin);
  }
}

// --- selectors ---

class Select : public EachBackend {
 protected:
  // The selections of the next decode step.
  std::vector<Selection> Decode(HeldSequence& sequence, const Inputs& in) {
    return RunStep(sequence, in, 1, backend()).selections;
  }
};

TEST_P(Select, FullIsEverything) {
  const Inputs in(SmallGeometry(), 40, kSeed);
  HeldSequence sequence(in.g, "full");
  RunTo(sequence, in, 39, 39, backend());
  PrefillDone(sequence, backend());
  const Selection s = Decode(sequence, in)[0];
  EXPECT_TRUE(s.full);
  EXPECT_EQ(s.tokens, 40);
  EXPECT_EQ(s.runs, (std::vector<RunList>{{{0, 40}}}));
}

TEST_P(Select, WindowIsSinksAndRecent) {
  const Inputs in(SmallGeometry(), 60, kSeed);
  HeldSequence sequence(in.g, "window{n_sink = 4, n_recent = 10, min_tokens = 12}");
  RunTo(sequence, in, 5, 5, backend());
  PrefillDone(sequence, backend());
  for (int32_t n = 6; n <= 60; ++n) {
    const Selection s = Decode(sequence, in)[1];
    EXPECT_EQ(s.full, n <= 14) << n;
    const Ints expected = n <= 14 ? Upto(0, n) : UnionOf(Upto(0, 4), Upto(n - 10, n));
    ASSERT_EQ(PositionsOf(s.runs[0]), expected) << n;
    ASSERT_EQ(s.groups(), 1);
  }
}

struct QuestCase {
  int32_t page, budget, sink, recent, kv_heads, group;
};

TEST_P(Select, QuestTakesThePagesOfTheLargestPossibleLogit) {
  const QuestCase cases[] = {{16, 64, 0, 1, 2, 2}, {16, 64, 20, 30, 2, 3}, {8, 20, 3, 20, 1, 4},
                             {5, 33, 0, 7, 3, 1},  {64, 64, 1, 1, 2, 2},   {16, 15, 0, 1, 2, 2}};
  int skipped = 0;
  for (const QuestCase& c : cases) {
    const Inputs in(SmallGeometry(c.kv_heads, c.group), 200, kSeed);
    HeldSequence sequence(
        in.g, "quest{page = " + std::to_string(c.page) + ", budget = " + std::to_string(c.budget) +
                  ", n_sink = " + std::to_string(c.sink) +
                  ", n_recent = " + std::to_string(c.recent) + ", min_tokens = 0}");
    RunTo(sequence, in, 40, 40, backend());
    PrefillDone(sequence, backend());
    for (int32_t n = 41; n <= in.n; ++n) {
      const std::vector<Selection> selections = Decode(sequence, in);
      const int32_t first = (c.sink + c.page - 1) / c.page;
      const int32_t last = std::max(first, std::max(n - c.recent, 0) / c.page);
      const Ints always = UnionOf(Upto(0, std::min(first * c.page, n)), Upto(last * c.page, n));
      for (int layer = 0; layer < in.g.layers; ++layer) {
        const Selection& s = selections[layer];
        if (static_cast<int32_t>(always.size()) + c.budget >= n) {
          ASSERT_TRUE(s.full);
          ASSERT_EQ(PositionsOf(s.runs[0]), Upto(0, n));
          continue;
        }
        ASSERT_EQ(s.groups(), in.g.kv_heads);
        for (int head = 0; head < in.g.kv_heads; ++head) {
          std::vector<double> scores = QuestScores(in, n, c.page, layer, head);
          scores = {scores.begin() + first, scores.begin() + last};
          if (!IsStable(scores, c.budget / c.page)) {
            ++skipped;
            continue;
          }
          Ints units = TopK(scores, c.budget / c.page);
          for (int32_t& u : units) u += first;
          ASSERT_EQ(s.units[head], units) << "seed " << kSeed << " n " << n << " head " << head;
          ASSERT_EQ(PositionsOf(s.runs[head]), UnionOf(always, PositionsOfUnits(units, c.page, n)));
        }
      }
    }
  }
  EXPECT_LT(skipped, 20);  // out of about 4000
}

TEST_P(Select, DeviationTakesThePagesOfTheLargestLogitsByMeanAndDeviation) {
  const QuestCase cases[] = {{16, 64, 0, 1, 2, 2}, {8, 20, 3, 20, 1, 4}, {5, 33, 0, 7, 3, 1}};
  int skipped = 0;
  for (const QuestCase& c : cases) {
    Geometry g = SmallGeometry(c.kv_heads, c.group);
    g.dtype = DType::kF32;  // means and variances that are not rounded
    const Inputs in(g, 150, kSeed);
    for (const bool softmax : {false, true}) {
      HeldSequence sequence(in.g, "quest{score = \"deviation\", page = " + std::to_string(c.page) +
                                      ", budget = " + std::to_string(c.budget) +
                                      ", n_sink = " + std::to_string(c.sink) + ", n_recent = " +
                                      std::to_string(c.recent) + ", min_tokens = 0, group = \"" +
                                      (softmax ? "softmax" : "max") + "\"}");
      RunTo(sequence, in, 120, 120, backend());
      PrefillDone(sequence, backend());
      for (int32_t n = 121; n <= in.n; ++n) {
        const Selection s = Decode(sequence, in)[1];
        ASSERT_FALSE(s.full);
        const kvstrata::Run pages = {(c.sink + c.page - 1) / c.page, (n - c.recent) / c.page};
        for (int head = 0; head < in.g.kv_heads; ++head) {
          const auto scores = DeviationScores(in, c.page, pages, n, 1, head, softmax);
          if (!IsStable(scores, c.budget / c.page)) {
            ++skipped;
            continue;
          }
          Ints units = TopK(scores, c.budget / c.page);
          for (int32_t& u : units) u += pages.begin;
          ASSERT_EQ(s.units[head], units) << "seed " << kSeed << " n " << n << " head " << head;
        }
      }
    }
  }
  EXPECT_LT(skipped, 10);  // out of 360
}

TEST_P(Select, TiesGoToTheLowerPage) {
  Inputs in(SmallGeometry(), 200, kSeed);
  std::fill(in.keys.begin(), in.keys.end(), 1.0f);
  HeldSequence quest(in.g, "quest{page = 16, budget = 48, min_tokens = 0}");
  RunTo(quest, in, 199, 199, backend());
  PrefillDone(quest, backend());
  EXPECT_EQ(Decode(quest, in)[0].units[1], (Ints{0, 1, 2}));
  HeldSequence chess(in.g,
                     "chess{page = 8, pages_per_chunk = 2, chunks_per_grid = 3, window = 2, "
                     "rho = [0.5, 0.5, 0.5], min_tokens = 0}");
  RunTo(chess, in, 199, 199, backend());
  PrefillDone(chess, backend());
  // Pages 1..22 compete in grids 0..3: 2 grids, of their 6 chunks 3, of their pages 1..5 three.
  EXPECT_EQ(Decode(chess, in)[0].units[0], (Ints{0, 1, 2, 3, 23, 24}));
}

TEST_P(Select, BudgetIsTheProductOfTheShares) {
  const Inputs in(SmallGeometry(), 4 * 16 * 100, kSeed);
  for (const std::string rho : {"[0.5, 0.2, 0.1]", "[0.8, 0.7, 0.7]", "[0.9, 0.9, 0.9]"}) {
    HeldSequence sequence(in.g,
                          "chess{page = 4, pages_per_chunk = 4, chunks_per_grid = 4, sinks = 0, "
                          "window = 1, min_tokens = 0, rho = " +
                              rho + "}");
    RunTo(sequence, in, in.n - 1, 4096, backend());
    PrefillDone(sequence, backend());
    const Plan& p = sequence.state->plan();
    const double pages = static_cast<double>(Decode(sequence, in)[0].units[0].size());
    EXPECT_NEAR(pages / 1600, p.cascade.rho[0] * p.cascade.rho[1] * p.cascade.rho[2], 0.002) << rho;
  }
}

struct ChessCase {
  const char* options;
  bool reports;
};

class Chess : public Select {
 protected:
  // Entropies such that some pages exceed the thresholds; none for one position in seven.
  static double EntropyOf(int32_t t) { return t % 7 == 3 ? NAN : 0.5 + 0.25 * ((t * t / 16) % 6); }

  void Check(HeldSequence& sequence, const ChessOracle& oracle, int32_t n,
             const std::vector<Selection>& selections, int* skipped) {
    ASSERT_EQ(Inspected<int32_t>(sequence, backend(), "selections")[0], oracle.selections) << n;
    if (!oracle.stable) {
      ++*skipped;
      return;
    }
    for (const Selection& s : selections) {
      ASSERT_EQ(s.groups(), 1);
      ASSERT_EQ(s.units[0], oracle.Table(n)) << "seed " << kSeed << " n " << n;
      ASSERT_EQ(PositionsOf(s.runs[0]),
                PositionsOfUnits(oracle.Table(n), sequence.state->plan().index.unit, n));
    }
  }
  void CheckScores(HeldSequence& sequence, const ChessOracle& oracle) {
    const char* names[] = {"page_scores", "chunk_scores", "grid_scores"};
    for (int level = 0; level < 3; ++level) {
      const auto got = Inspected<float>(sequence, backend(), names[level]);
      const auto& expected = oracle.scores[level];
      ASSERT_EQ(got.size(), expected.size()) << names[level];
      double largest = 0;
      for (const double x : expected) largest = std::max(largest, std::abs(x));
      for (size_t u = 0; u < got.size(); ++u) ASSERT_NEAR(got[u], expected[u], 1e-5 * largest);
    }
  }
  void Report(HeldSequence& sequence, int32_t t) {
    const auto entropy = static_cast<float>(EntropyOf(t));
    if (std::isnan(entropy)) return;
    const Status s = sequence.state->Report(t, 1, nullptr, &entropy, nullptr);
    ASSERT_TRUE(s.ok()) << s.ToString();
  }
};

constexpr ChessCase kChessCases[] = {
    {"trigger = \"entropy\", thresholds = [1.0, 0.1]", true},
    {"trigger = \"entropy\", thresholds = [1.2, 0.2], combine = \"or\"", true},
    {"trigger = \"entropy\", every = 3", false},
    {"trigger = \"every\", every = 2", true},
    {"trigger = \"always\"", true},
    {"trigger = \"always\", cascade = \"literal\", rho = [0.6, 0.5, 0.4]", false},
    {"trigger = \"every\", every = 1, cascade = \"literal\"", false},
    {"trigger = \"every\", every = 1, sinks = 30, window = 2", false},
    {"trigger = \"every\", every = 1, sinks = 0, window = 1, page = 16", false},
    {"trigger = \"always\", centred = true", false},
    {"trigger = \"always\", centred = true, cascade = \"literal\", rho = [0.6, 0.5, 0.4]", false}};

std::string ChessText(const std::string& options) {
  std::string text = "chess{min_tokens = 0, pages_per_chunk = 3, chunks_per_grid = 3, ";
  if (options.find("page = 16") == std::string::npos) text += "page = 8, ";
  if (options.find("window") == std::string::npos) text += "window = 3, ";
  if (options.find("rho") == std::string::npos) text += "rho = [0.6, 0.6, 0.5], ";
  return text + options + "}";
}

TEST_P(Chess, FollowsTheSpecificationStepByStep) {
  const Inputs in(SmallGeometry(), 330, kSeed);
  int skipped = 0;
  for (const ChessCase& c : kChessCases) {
    for (const int32_t prompt : {3, 150}) {
      SCOPED_TRACE(std::string(c.options) + " prompt " + std::to_string(prompt));
      HeldSequence sequence(in.g, ChessText(c.options));
      ChessOracle oracle(in, sequence.state->plan());
      RunTo(sequence, in, prompt, 64, backend());
      for (int32_t t = 0; t < prompt; ++t) oracle.Append(NAN);
      PrefillDone(sequence, backend());
      oracle.FinishPrefill();
      for (int32_t t = prompt; t < in.n; ++t) {
        const auto selections = Decode(sequence, in);
        ASSERT_NO_FATAL_FAILURE(Check(sequence, oracle, t + 1, selections, &skipped));
        if (c.reports) {
          ASSERT_NO_FATAL_FAILURE(Report(sequence, t));
        }
        oracle.Append(c.reports ? EntropyOf(t) : NAN);
      }
      Settle(sequence, backend());
      EXPECT_GT(oracle.selections, 1);
      ASSERT_NO_FATAL_FAILURE(CheckScores(sequence, oracle));
    }
  }
  EXPECT_LT(skipped, 600);  // out of about 4600; a literal quantile often is a score itself
}

// Many tokens at once: page by page as one at a time would, and what a selection at a page's end
// cannot have seen does not count.
TEST_P(Chess, ManyTokensAtOnceAreLikeOneAtATime) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  for (const ChessCase& c : kChessCases) {
    HeldSequence single(in.g, ChessText(c.options)), chunked(in.g, ChessText(c.options));
    for (HeldSequence* s : {&single, &chunked}) {
      RunTo(*s, in, 101, 101, backend());
      PrefillDone(*s, backend());
    }
    for (const int32_t end : {103, 130, 131, 230, 300, 399}) {
      RunTo(single, in, end, 1, backend());
      RunTo(chunked, in, end, 1000, backend());
      HeldSequence a(single), b(chunked);  // to look without disturbing
      EXPECT_EQ(Decode(a, in)[0].units, Decode(b, in)[0].units) << c.options << " end " << end;
      EXPECT_EQ(Inspected<int32_t>(a, backend(), "selections"),
                Inspected<int32_t>(b, backend(), "selections"))
          << c.options << " end " << end;
      EXPECT_EQ(Inspected<float>(a, backend(), "page_scores"),
                Inspected<float>(b, backend(), "page_scores"))
          << c.options << " end " << end;
    }
  }
}

TEST_P(Chess, EntropyOfPromptTokensDoesNotCount) {
  const Inputs in(SmallGeometry(), 80, kSeed);
  HeldSequence sequence(in.g, ChessText("trigger = \"entropy\", thresholds = [1.0, 0.0]"));
  RunTo(sequence, in, 44, 44, backend());
  const std::vector<float> prompt(44, 9.0f);
  ASSERT_TRUE(sequence.state->Report(0, 44, nullptr, prompt.data(), nullptr).ok());
  PrefillDone(sequence, backend());
  const std::vector<float> calm = {0.1f, 0.2f, 0.1f, 0.2f};
  RunTo(sequence, in, 48, 4, backend());
  ASSERT_TRUE(sequence.state->Report(44, 4, nullptr, calm.data(), nullptr).ok());
  Settle(sequence, backend());
  EXPECT_EQ(Inspected<int32_t>(sequence, backend(), "selections")[0], 1);
  const std::vector<float> wild = {0.1f, 9.0f, 0.1f, 9.0f, 0.1f, 9.0f, 0.1f, 9.0f};
  RunTo(sequence, in, 56, 8, backend());
  ASSERT_TRUE(sequence.state->Report(48, 8, nullptr, wild.data(), nullptr).ok());
  Settle(sequence, backend());
  EXPECT_EQ(Inspected<int32_t>(sequence, backend(), "selections")[0], 2);
}

// Channels that are large everywhere decide without centring, and not with it.
TEST_P(Chess, CentringTakesConstantChannelsAway) {
  Inputs in(SmallGeometry(), 330, kSeed);
  const int64_t token = 2 * 2 * 64;
  // One channel is large and wanders; the rest of each page points where its neighbours' do not.
  for (int32_t t = 0; t < in.n; ++t) {
    for (int64_t row = 0; row < token; row += 64) {
      for (int c = 0; c < 64; ++c) {
        float& x = in.keys[t * token + row + c];
        const bool alike = t / 8 == 5 || t >= 320;  // page 5 is like the window
        x = ToFloat(FromFloat<BF16>(c == 0 ? 60 + (t / 8 == 9 ? 4.0f : 0.0f)
                                           : 0.1f * x + (alike && c % 2 == 0 ? 1.0f : 0.0f)));
      }
    }
  }
  for (const bool centred : {false, true}) {
    HeldSequence sequence(in.g,
                          std::string("chess{min_tokens = 0, page = 8, pages_per_chunk = 40, ") +
                              "window = 2, sinks = 0, rho = [1, 1, 0.02], centred = " +
                              (centred ? "true}" : "false}"));
    RunTo(sequence, in, 328, 64, backend());
    PrefillDone(sequence, backend());
    EXPECT_EQ(Decode(sequence, in)[0].units[0][0], centred ? 5 : 9);
  }
}

Ints CoarseTokens(const HeldSequence& sequence, const std::vector<CoarseRun>& rows) {
  Ints tokens;
  for (const CoarseRun& r : rows) {
    const int32_t size = sequence.state->index().levels[r.level].unit_tokens;
    for (int32_t t = r.units.begin * size; t < r.units.end * size; ++t) tokens.push_back(t);
  }
  return tokens;
}

// What is attended and what stands in for the rest are all tokens, each once; with `tree` the rest
// is cut as coarsely as the selection allows.
TEST_P(Chess, TheRestIsEverythingElse) {
  const Inputs in(SmallGeometry(), 700, kSeed);
  size_t levels[3] = {};
  for (const bool tree : {false, true}) {
    HeldSequence sequence(in.g,
                          ChessText(std::string("trigger = \"every\", every = 2, rest = \"mean\", "
                                                "rho = [0.4, 0.5, 0.5], tree = ") +
                                    (tree ? "true" : "false")));
    RunTo(sequence, in, 20, 20, backend());
    PrefillDone(sequence, backend());
    while (sequence.state->tokens() < in.n) {
      const Selection s = Decode(sequence, in)[1];
      ASSERT_EQ(s.coarse.size(), 1u);
      Ints all = PositionsOf(s.runs[0]);
      const Ints rest = CoarseTokens(sequence, s.coarse[0]);
      ASSERT_TRUE(std::is_sorted(rest.begin(), rest.end()));
      all.insert(all.end(), rest.begin(), rest.end());
      std::sort(all.begin(), all.end());
      ASSERT_EQ(all, Upto(0, s.tokens)) << s.tokens;
      const int32_t pages[] = {1, 3, 9};
      for (const CoarseRun& r : s.coarse[0]) {
        ++levels[r.level];
        if (!tree) {
          ASSERT_EQ(r.level, 0);
        }
        if (!tree || r.level == 2) continue;
        for (int32_t u = r.units.begin; u < r.units.end; ++u) {
          // The unit above holds something that is attended.
          const int32_t parent = u * pages[r.level] / pages[r.level + 1];
          const auto attended = [&](int32_t page) {
            return std::find(s.units[0].begin(), s.units[0].end(), page) != s.units[0].end();
          };
          bool any = false;
          for (int32_t p = 0; p < pages[r.level + 1]; ++p) {
            any |= attended(parent * pages[r.level + 1] + p);
          }
          ASSERT_TRUE(any) << "level " << r.level << " unit " << u;
        }
      }
    }
  }
  EXPECT_GT(levels[0], 10u);
  EXPECT_GT(levels[1], 10u);
  EXPECT_GT(levels[2], 10u);
}

TEST_P(Chess, PageVectorsAreTheStoredMeans) {
  const Inputs in(SmallGeometry(), 44, kSeed);
  HeldSequence sequence(in.g, ChessText("trigger = \"always\""));
  RunTo(sequence, in, 44, 44, backend());
  EXPECT_TRUE(
      Inspected<uint16_t>(sequence, backend(), "page_vectors_bf16").empty());  // not settled
  Settle(sequence, backend());
  const auto vectors = Inspected<uint16_t>(sequence, backend(), "page_vectors_bf16");
  ASSERT_EQ(vectors.size(), 5u * 2 * 2 * 64);
  float sum = 0;
  for (int32_t t = 8; t < 16; ++t) sum += in.Key(t, 1, 0)[5];
  EXPECT_EQ(vectors[1 * 256 + 1 * 128 + 0 * 64 + 5], FromFloat<BF16>(sum / 8.0f).bits);
}

TEST_P(Select, MinTokensAndDenseLayersAttendInFull) {
  const Inputs in(SmallGeometry(), 130, kSeed);
  const std::string common = "min_tokens = 120, n_dense_layers = 1";
  for (const std::string& plan :
       {"window{n_recent = 8, " + common + "}", "quest{budget = 16, " + common + "}",
        "chess{page = 8, window = 1, " + common + "}"}) {
    HeldSequence sequence(in.g, plan);
    RunTo(sequence, in, 100, 100, backend());
    PrefillDone(sequence, backend());
    for (int32_t n = 101; n <= in.n; ++n) {
      const auto s = Decode(sequence, in);
      EXPECT_TRUE(s[0].full) << plan << " dense layer at " << n;
      EXPECT_EQ(s[1].full, n < 120) << plan << " at " << n;
    }
  }
}

TEST_P(Select, UnknownArraysNameWhatThereIs) {
  const Inputs in(SmallGeometry(), 20, kSeed);
  for (const char* plan : {"full", "window", "quest", "chess"}) {
    HeldSequence sequence(in.g, plan);
    RunTo(sequence, in, 20, 20, backend());
    const Status s =
        sequence.state->Inspect(sequence.View(), backend(), InlineExecutor(), "votes").status();
    EXPECT_EQ(s.code(), Code::kNotFound);
    EXPECT_EQ(s.reason(), "INSPECT_UNKNOWN");
    EXPECT_THAT(s.message(), ::testing::HasSubstr("'votes'"));
    EXPECT_THAT(s.message(), ::testing::HasSubstr("surprisal"));
  }
}

KVS_FOR_EACH_BACKEND(Select);
KVS_FOR_EACH_BACKEND(Chess);

}  // namespace
}  // namespace kvstrata
