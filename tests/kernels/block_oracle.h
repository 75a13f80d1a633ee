// SPDX-License-Identifier: Apache-2.0
// What a decode step over an engine's own blocks has to give, by a plan and the rows themselves, in
// doubles and one loop after the other. For tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "kernels/blocks/block_shape.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "kernels/ops/summarize/summarize.h"
#include "kernels/plan/plan.h"
#include "kernels/select/selection_rule.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {

// The rows of one sequence, as the host has them.
struct BlockRows {
  const BlockShape& shape;
  const std::byte* mirror;
  const int64_t* layers;  // where each lies in it
  const int32_t* blocks;
  int32_t tokens;

  int64_t KeyAt(int layer, int head, int32_t t) const {
    return layers[layer] + blocks[t / shape.block_tokens] * shape.block_stride +
           head * shape.head_stride + t % shape.block_tokens * shape.slot_stride;
  }
  float KeyOf(int layer, int head, int32_t t, int c) const {
    return LoadAs(DType::kBF16, mirror + KeyAt(layer, head, t) + 2 * c);
  }
  float ValueOf(int layer, int head, int32_t t, int c) const {
    return LoadAs(DType::kBF16, mirror + KeyAt(layer, head, t) + shape.value_offset + 2 * c);
  }
};

class BlockOracle {
 public:
  BlockOracle() = default;
  // Lists whose last score and the first one left out differ by less than `tie` of it are not
  // compared.
  BlockOracle(Plan plan, float tie) : plan_(std::move(plan)), tie_(tie) {}

  // The largest relative error over the query heads: q, out [query_heads][head_dim], bf16. in_full:
  // everything is attended, whatever the plan.
  double ErrorOf(const BlockRows& s, int layer, bool in_full, const std::byte* q,
                 const std::byte* out) {
    const Geometry& g = s.shape.geometry;
    std::vector<float> queries;
    for (int i = 0; i < g.query_heads * g.head_dim; ++i) {
      queries.push_back(LoadAs(DType::kBF16, q + 2 * i));
    }
    double worst = 0;
    for (int h = 0; h < g.query_heads; ++h) {
      const std::set<int32_t> attended = Attended(s, layer, in_full, queries.data(), h);
      ++(attended.empty() ? near_ties_ : compared_);
      if (attended.empty()) continue;
      const std::vector<double> want =
          Output(s, layer, h / g.group(), &queries[static_cast<size_t>(h * g.head_dim)], attended);
      std::vector<float> got;
      for (int c = 0; c < g.head_dim; ++c) {
        got.push_back(LoadAs(DType::kBF16, out + 2 * (h * g.head_dim + c)));
      }
      worst = std::max(worst, Apart(got.data(), want));
    }
    return worst;
  }

  // The same of what an audit says: the plan's outputs and full attention's, and at the end what of
  // its mass the plan attended: said [2][query_heads][head_dim], then [2][query_heads] of lse.
  double AuditErrorOf(const BlockRows& s, int layer, bool in_full, const std::byte* q,
                      const float* said) const {
    const Geometry& g = s.shape.geometry;
    std::vector<float> queries;
    for (int i = 0; i < g.query_heads * g.head_dim; ++i) {
      queries.push_back(LoadAs(DType::kBF16, q + 2 * i));
    }
    const float* const lse = said + int64_t{2} * g.query_heads * g.head_dim;
    double worst = 0;
    for (int h = 0; h < g.query_heads; ++h) {
      const float* const own = &queries[static_cast<size_t>(h * g.head_dim)];
      const std::set<int32_t> attended = Attended(s, layer, in_full, queries.data(), h);
      if (attended.empty()) continue;
      const std::set<int32_t> all = Attended(s, layer, true, queries.data(), h);
      const float* const rows = said + h * g.head_dim;
      const int head = h / g.group();
      worst = std::max(worst, Apart(rows, Output(s, layer, head, own, attended)));
      worst = std::max(worst,
                       Apart(rows + g.query_heads * g.head_dim, Output(s, layer, head, own, all)));
      const double mass = Mass(s, layer, head, own, attended) / Mass(s, layer, head, own, all);
      worst = std::max(worst, std::abs(std::exp(lse[h] - lse[h + g.query_heads]) - mass));
    }
    return worst;
  }

  // Query heads, in all calls.
  int compared() const { return compared_; }
  int near_ties() const { return near_ties_; }

 private:
  cuda::CandidateRule Rule() const {
    switch (plan_.selector) {
      case SelectorKind::kMinMax:
        return MinMaxCandidates(plan_);
      case SelectorKind::kVote:
        return VoteCandidates(plan_);
      case SelectorKind::kBits:
        return BitsCandidates(plan_);
      default:
        return {1, plan_.window.sinks, plan_.window.recent, 0, plan_.min_tokens};
    }
  }

  // What query head h attends; empty: its choice is a near tie.
  std::set<int32_t> Attended(const BlockRows& s, int layer, bool in_full, const float* q,
                             int h) const {
    std::set<int32_t> all;
    const auto add = [&all](int32_t begin, int32_t end) {
      for (int32_t t = begin; t < end; ++t) all.insert(t);
    };
    const cuda::CandidateRule rule = Rule();
    const cuda::Candidates units = CandidatesOf(rule, s.tokens);
    in_full |= plan_.selector == SelectorKind::kFull || layer < plan_.n_dense_layers || units.full;
    if (in_full) {
      add(0, s.tokens);
      return all;
    }
    add(0, units.first * rule.unit_tokens);
    add(units.last * rule.unit_tokens, s.tokens);
    if (plan_.selector == SelectorKind::kWindow) return all;
    const int group = plan_.selector == SelectorKind::kVote ? s.shape.geometry.query_heads
                                                            : s.shape.geometry.group();
    const int first = h / group * group;
    const std::vector<float> scores = ScoresOf(s, layer, q, first, first + group, rule, units);
    std::vector<float> sorted = scores;
    std::ranges::sort(sorted, std::greater<>());
    const float last = sorted[static_cast<size_t>(rule.take) - 1];
    if (last - sorted[static_cast<size_t>(rule.take)] <= tie_ * std::abs(last)) return {};
    for (size_t i = 0; i < scores.size(); ++i) {
      const int32_t unit = units.first + static_cast<int32_t>(i);
      if (scores[i] >= last) add(unit * rule.unit_tokens, (unit + 1) * rule.unit_tokens);
    }
    return all;
  }

  // ||x - want|| / ||want||.
  static double Apart(const float* x, const std::vector<double>& want) {
    double error = 0, size = 0;
    for (size_t c = 0; c < want.size(); ++c) {
      error += (x[c] - want[c]) * (x[c] - want[c]);
      size += want[c] * want[c];
    }
    return std::isfinite(error) ? std::sqrt(error / size) : INFINITY;
  }

  static double WeightOf(const BlockRows& s, int layer, int head, const float* q, int32_t t) {
    const Geometry& g = s.shape.geometry;
    double dot = 0;
    for (int c = 0; c < g.head_dim; ++c) dot += double{q[c]} * s.KeyOf(layer, head, t, c);
    return std::exp(dot * g.logit_scale());
  }
  static double Mass(const BlockRows& s, int layer, int head, const float* q,
                     const std::set<int32_t>& attended) {
    double sum = 0;
    for (const int32_t t : attended) sum += WeightOf(s, layer, head, q, t);
    return sum;
  }

  static std::vector<double> Output(const BlockRows& s, int layer, int head, const float* q,
                                    const std::set<int32_t>& attended) {
    const Geometry& g = s.shape.geometry;
    std::vector<double> sum(static_cast<size_t>(g.head_dim));
    double weights = 0;
    for (const int32_t t : attended) {
      const double weight = WeightOf(s, layer, head, q, t);
      weights += weight;
      for (int c = 0; c < g.head_dim; ++c) {
        sum[static_cast<size_t>(c)] += weight * s.ValueOf(layer, head, t, c);
      }
    }
    for (double& x : sum) x /= weights;
    return sum;
  }

  // By candidate: what its list is picked by, of the query heads [first, last).
  std::vector<float> ScoresOf(const BlockRows& s, int layer, const float* q, int first, int last,
                              const cuda::CandidateRule& rule,
                              const cuda::Candidates& units) const {
    const bool votes = plan_.selector != SelectorKind::kMinMax || plan_.minmax.group_softmax;
    // Votes of selector bits are the tokens', summed over runs.
    const int32_t run = plan_.selector == SelectorKind::kBits ? plan_.bits.run : 1;
    const double scale = votes ? s.shape.geometry.logit_scale() : 1;
    std::vector<double> best(static_cast<size_t>(units.count()), votes ? 0 : -INFINITY);
    for (int h = first; h < last; ++h) {
      const int head = h / s.shape.geometry.group();
      const float* const own_q = q + int64_t{h} * s.shape.geometry.head_dim;
      std::vector<double> own;
      if (plan_.selector == SelectorKind::kBits) {
        own = BitsScoresOf(s, layer, head, own_q, units.first * run, units.last * run);
      } else {
        for (int32_t u = units.first; u < units.last; ++u) {
          own.push_back(ScoreOf(s, layer, head, own_q, u, rule));
        }
      }
      for (double& x : own) x *= scale;
      const double top = *std::ranges::max_element(own);
      double sum = 0;
      for (const double x : own) sum += std::exp(x - top);
      for (size_t i = 0; i < own.size(); ++i) {
        double& of = best[i / static_cast<size_t>(run)];
        of = votes ? of + std::exp(own[i] - top) / sum : std::max(of, own[i]);
      }
    }
    return {best.begin(), best.end()};
  }

  double ScoreOf(const BlockRows& s, int layer, int head, const float* q, int32_t unit,
                 const cuda::CandidateRule& rule) const {
    if (plan_.minmax.deviation) return DeviationOf(s, layer, head, q, unit, rule);
    double sum = 0;
    for (int c = 0; c < s.shape.geometry.head_dim; ++c) {
      double most = -INFINITY;
      for (int32_t i = 0; i < rule.unit_tokens; ++i) {
        most = std::max(most, double{q[c]} * s.KeyOf(layer, head, unit * rule.unit_tokens + i, c));
      }
      sum += most;
    }
    return sum;
  }

  // By the mean and the variance of a unit, as the index has them.
  double DeviationOf(const BlockRows& s, int layer, int head, const float* q, int32_t unit,
                     const cuda::CandidateRule& rule) const {
    const int dim = s.shape.geometry.head_dim;
    std::vector<std::byte> mean(static_cast<size_t>(2 * dim)), variance(mean.size());
    auto* page = const_cast<std::byte*>(s.mirror + s.KeyAt(layer, head, unit * rule.unit_tokens));
    const PagedRows keys{&page, 0, s.shape.slot_stride, rule.unit_tokens, dim, DType::kBF16};
    const SummarizeWork work{SummarizeWork::Kind::kDeviation,
                             keys,
                             {0, rule.unit_tokens},
                             mean.data(),
                             variance.data(),
                             DType::kBF16};
    SummarizeRef(&work, 1, InlineExecutor());
    double sum = 0, squares = 0;
    for (int c = 0; c < dim; ++c) {
      sum += double{q[c]} * LoadAs(DType::kBF16, &mean[static_cast<size_t>(2 * c)]);
      squares += double{q[c]} * q[c] * LoadAs(DType::kBF16, &variance[static_cast<size_t>(2 * c)]);
    }
    return sum + 2 * std::sqrt(squares);
  }

  // Scores of the tokens [begin, end), by their keys in few bits.
  std::vector<double> BitsScoresOf(const BlockRows& s, int layer, int head, const float* q,
                                   int32_t begin, int32_t end) const {
    const QuantisedGroup format{s.shape.geometry.head_dim, plan_.bits.bits, plan_.index.unit};
    std::vector<float> scores(static_cast<size_t>(end - begin));
    std::vector<std::byte> group(static_cast<size_t>(format.bytes()));
    std::byte* block = group.data();
    for (int32_t t = begin, next; t < end; t = next) {
      const int32_t first = t / format.tokens * format.tokens;
      next = std::min(first + format.tokens, end);
      auto* page = const_cast<std::byte*>(s.mirror + s.KeyAt(layer, head, first));
      const PagedRows keys{&page, 0, s.shape.slot_stride, format.tokens, format.dim, DType::kBF16};
      const QuantiseKeysWork seal{keys, 0, format, block};
      QuantiseKeysRef(&seal, 1, InlineExecutor());
      const ScoreBitsWork score{{format, &block, 0, 1},
                                {t - first, next - first},
                                q,
                                1,
                                1.0f,
                                &scores[static_cast<size_t>(t - begin)],
                                0};
      ScoreBitsRef(&score, 1, InlineExecutor());
    }
    return {scores.begin(), scores.end()};
  }

  Plan plan_;
  float tie_ = 0;
  int compared_ = 0, near_ties_ = 0;
};

}  // namespace kvstrata
