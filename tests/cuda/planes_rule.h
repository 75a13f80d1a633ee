// SPDX-License-Identifier: Apache-2.0
// The rule of docs/spec/planes.md in double precision over what a device chose: near-ties may fall
// either way, outputs over one choice may not differ.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/ops/pick/pick.h"
#include "tests/cuda/planes_inputs.h"

namespace kvstrata::cuda {

// What a device wrote. [row][dim] of outputs, or partials: o, then m [row], then l [row]
struct PlanesOutputs {
  std::vector<float> rows, lse;
  std::vector<uint8_t> fine, strips;   // [item][stride], [item][stride / 16]
  std::vector<uint64_t> fetched, hot;  // [item]
};

// What the device made of one (sequence, KV head), and what it should be.
struct PlanesItemErrors {
  double output = 0;  // the largest |got - want| / |want| of a row
  double lse = 0;
  double logit = 0;                      // the largest lse
  int wrong_fine = 0, wrong_strips = 0;  // beyond the margin
  int first_wrong = -1;                  // token
  double weight = 0, limit = 0;          // its weight times N, or its mass
};

// What was compared.
struct PlanesCounts {
  int fine = 0, candidates = 0, near_ties = 0;  // tokens; the last: chosen otherwise
};

// The rule over what a device chose.
class PlanesOracle {
 public:
  PlanesOracle(const PlanesInputs& inputs, const PlanesOutputs& got) : in_(inputs), got_(got) {}

  PlanesItemErrors Compare(size_t item, double margin) {
    PlanesItemErrors e;
    CompareChoice(item, margin, e);
    for (int g = 0; g < in_.shape().group; ++g) CompareRow(item, item * in_.shape().group + g, e);
    return e;
  }

  // Holds row `row` of what was read to the partial (m, l, o) of its sealed tokens.
  void CheckRow(size_t row, double m, double l, const std::vector<double>& o,
                PlanesItemErrors& e) const {
    const Merged want = MergedRow(row, m, l, o);
    const auto dim = static_cast<size_t>(in_.shape().dim);
    const std::vector<double> own(got_.rows.begin() + row * dim,
                                  got_.rows.begin() + (row + 1) * dim);
    Merged got{0, own};
    if (in_.shape().merges) {
      got.lse = got_.lse[row];
    } else {
      got = MergedRow(row, got_.rows[in_.Rows() * dim + row],
                      got_.rows[in_.Rows() * (dim + 1) + row], own);
    }
    double off = 0, norm = 0;
    for (size_t c = 0; c < dim; ++c) {
      off += (got.o[c] - want.o[c]) * (got.o[c] - want.o[c]);
      norm += want.o[c] * want.o[c];
    }
    const auto finite = [](double x) {
      return std::isnan(x) ? std::numeric_limits<double>::infinity() : x;
    };
    e.output = std::max(e.output, off == 0 ? 0 : finite(std::sqrt(off / norm)));
    e.lse = std::max(e.lse, finite(std::abs(got.lse - want.lse)));
    e.logit = std::max(e.logit, std::abs(want.lse));
  }

  const PlanesCounts& counts() const { return counts_; }

 private:
  static constexpr int kGroup = 64;
  struct Merged {
    double lse = 0;
    std::vector<double> o;
  };

  const uint8_t* Fine(size_t item) const { return &got_.fine[item * in_.Stride()]; }
  const uint8_t* Strips(size_t item) const { return &got_.strips[item * in_.Stride() / 16]; }

  double Logit(size_t row, const std::vector<double>& keys, int token) const {
    double sum = 0;
    for (int c = 0; c < in_.shape().dim; ++c) {
      sum += keys[static_cast<size_t>(token) * in_.shape().dim + c] *
             in_.q()[row * in_.shape().dim + c];
    }
    return sum * in_.scale();
  }

  // Rule 2: what scores of a row are above coarse logits, by group.
  std::vector<double> HalfVariances(size_t item, size_t row) const {
    const PlanesFormat& f = in_.format();
    std::vector<double> halves;
    for (int g = 0; g < in_.Sealed(item) / kGroup; ++g) {
      double squares = 0;
      for (int c = 0; c < f.dim; ++c) {
        F16 step;
        std::memcpy(&step, in_.Upper(item, g) + StepOffset(f, {PlanesSide::kKeys, 0, c}), 2);
        const double product = double{in_.scale()} * in_.q()[row * f.dim + c] * ToFloat(step);
        squares += product * product;
      }
      halves.push_back(RoundingVariance(f) / 2 * squares);
    }
    return halves;
  }

  // Rule 3.
  double LogNormaliser(size_t item, size_t row) const {
    const PlanesNumbers& n = in_.numbers(item);
    const int start = in_.Start(item), stop = in_.Stop(item), every = in_.shape().rule.sample;
    std::vector<double> always = {in_.RawLogSum(row)}, sampled, all;
    for (int t = start; t < in_.Sealed(item); ++t) {
      if (t >= stop) {
        always.push_back(Logit(row, n.fine_keys, t));
        continue;
      }
      all.push_back(Logit(row, n.coarse_keys, t));
      if (t / kGroup % every == (every - 1) / 2) sampled.push_back(all.back());
    }
    if (all.empty()) return 0;
    if (sampled.empty()) sampled = all;
    const double top = *std::ranges::max_element(sampled);
    double rest = 0;
    for (double x : sampled) rest += std::exp(x - top);
    rest = (rest - 1) * static_cast<double>(all.size()) / static_cast<double>(sampled.size());
    double sum = std::exp(top) * (1 + rest);
    for (double x : always) sum += std::exp(x);
    return std::log(sum);
  }

  // Weights of the rule, times N: [token], the largest of the heads; NaN if one is.
  std::vector<double> Weights(size_t item) const {
    std::vector<double> weights(static_cast<size_t>(in_.Sealed(item)), 0.0);
    for (int g = 0; g < in_.shape().group && in_.Start(item) < in_.Stop(item); ++g) {
      const size_t row = item * in_.shape().group + g;
      const double normaliser = LogNormaliser(item, row);
      const std::vector<double> halves = HalfVariances(item, row);
      for (int t = 0; t < in_.Sealed(item); ++t) {
        const double score =
            Logit(row, in_.numbers(item).coarse_keys, t) + halves[static_cast<size_t>(t / kGroup)];
        const double weight = std::exp(score - normaliser) * in_.Tokens(item);
        double& largest = weights[static_cast<size_t>(t)];
        if (std::isnan(weight) || weight > largest) largest = weight;
        if (std::isnan(weight)) break;
      }
    }
    return weights;
  }

  // Rule 4, `share`: how many candidates are fine.
  int Taken(size_t item) const {
    const int candidates = in_.Stop(item) - in_.Start(item);
    const int always = in_.Tokens(item) - candidates;
    return std::max(CeilShare(in_.shape().rule.share, in_.Tokens(item)) - always, 1);
  }

  // Masses of candidates: [token], 0 of others.
  std::vector<double> Masses(size_t item) const {
    std::vector<double> masses(static_cast<size_t>(in_.Sealed(item)), 0.0);
    for (int g = 0; g < in_.shape().group; ++g) {
      const size_t row = item * in_.shape().group + g;
      const std::vector<double> halves = HalfVariances(item, row);
      std::vector<double> scores;
      for (int t = in_.Start(item); t < in_.Stop(item); ++t) {
        scores.push_back(Logit(row, in_.numbers(item).coarse_keys, t) +
                         halves[static_cast<size_t>(t / kGroup)]);
      }
      const double top = *std::ranges::max_element(scores);
      double sum = 0;
      for (const double score : scores) sum += std::exp(score - top);
      for (size_t i = 0; i < scores.size(); ++i) {
        masses[static_cast<size_t>(in_.Start(item)) + i] += std::exp(scores[i] - top) / sum;
      }
    }
    return masses;
  }

  // What a candidate is fine by, and from where on.
  struct FineLimit {
    std::vector<double> sizes;  // [token]
    double limit = 0;
  };
  FineLimit FineLimitOf(size_t item, const std::vector<double>& weights) const {
    const double fine_above = in_.shape().rule.fine_above;
    if (fine_above > 0 || in_.Start(item) == in_.Stop(item)) return {weights, fine_above};
    std::vector<double> masses = Masses(item);
    std::vector<double> ranked(masses.begin() + in_.Start(item), masses.begin() + in_.Stop(item));
    std::ranges::sort(ranked, std::greater());
    EXPECT_EQ(CountFlags(Fine(item) + in_.Start(item), std::ssize(ranked)), Taken(item))
        << in_.Name(item);
    return {std::move(masses), ranked[static_cast<size_t>(Taken(item) - 1)]};
  }

  void CompareChoice(size_t item, double margin, PlanesItemErrors& e) {
    const std::vector<double> weights = Weights(item);
    const FineLimit fine_limit = FineLimitOf(item, weights);
    const uint8_t *fine = Fine(item), *strips = Strips(item);
    const auto check = [&](bool got, bool want, double weight, double limit, int token,
                           int& wrong) {
      if (got == want) return;
      if (std::abs(weight - limit) <= margin * limit + 1e-37) {
        ++counts_.near_ties;
        return;
      }
      ++wrong;
      if (e.first_wrong >= 0) return;
      e.first_wrong = token;
      e.weight = weight;
      e.limit = limit;
    };
    const double skip = in_.shape().rule.skip_below;
    for (int strip = 0; strip < in_.Sealed(item) / 16; ++strip) {
      bool has_fine = false, has_nan = false;
      double largest = 0;
      for (int t = 16 * strip; t < 16 * strip + 16; ++t) {
        const double weight = weights[static_cast<size_t>(t)];
        const bool always = t < in_.Start(item) || t >= in_.Stop(item);
        const double size = fine_limit.sizes[static_cast<size_t>(t)];
        check(fine[t] == 1, always || size >= fine_limit.limit, always ? -1e9 : size,
              fine_limit.limit, t, e.wrong_fine);
        EXPECT_LE(fine[t], 1) << in_.Name(item) << ": token " << t << " has no flag";
        has_fine |= fine[t] == 1;
        has_nan |= std::isnan(weight);
        largest = std::max(largest, weight);
        counts_.fine += !always && fine[t] == 1;
        counts_.candidates += !always;
      }
      check(strips[strip] == 1, has_fine || has_nan || !(largest < skip),
            has_fine || has_nan ? -1e9 : largest, skip, 16 * strip, e.wrong_strips);
    }
  }

  // Rule 6 over what the device chose.
  void CompareRow(size_t item, size_t row, PlanesItemErrors& e) {
    const PlanesNumbers& n = in_.numbers(item);
    std::vector<double> logits;
    double top = -std::numeric_limits<double>::infinity();
    for (int t = 0; t < in_.Sealed(item); ++t) {
      logits.push_back(Logit(row, Fine(item)[t] == 1 ? n.fine_keys : n.coarse_keys, t));
      if (Strips(item)[t / 16] == 1) top = std::max(top, logits.back());
    }
    std::vector<double> o(in_.shape().dim, 0.0);
    double l = 0;
    for (int t = 0; t < in_.Sealed(item); ++t) {
      if (Strips(item)[t / 16] != 1) continue;
      const double weight = std::exp(logits[static_cast<size_t>(t)] - top);
      const auto& values = Fine(item)[t] == 1 ? n.fine_values : n.coarse_values;
      l += weight;
      for (int c = 0; c < in_.shape().dim; ++c)
        o[c] += weight * values[static_cast<size_t>(t) * in_.shape().dim + c];
    }
    RotateHadamard(o.data(), in_.shape().dim);
    CheckRow(row, top, l, o, e);
  }

  // Partials merged with those of raw rows: what a part of no weight is off by does not count.
  Merged MergedRow(size_t row, double m, double l, const std::vector<double>& o) const {
    const auto dim = static_cast<size_t>(in_.shape().dim);
    double top = l == 0 ? -std::numeric_limits<double>::infinity() : m, sum = 0;
    for (int part = 0; part < in_.shape().raw_parts; ++part) {
      top = std::max<double>(top, in_.raw().m[part * in_.Rows() + row]);
    }
    const double own = l == 0 ? 0 : std::exp(m - top);
    Merged merged;
    for (size_t c = 0; c < dim; ++c) merged.o.push_back(own == 0 ? 0 : own * o[c]);
    sum = own == 0 ? 0 : own * l;
    for (int part = 0; part < in_.shape().raw_parts; ++part) {
      const size_t at = part * in_.Rows() + row;
      const double weight = std::exp(in_.raw().m[at] - top);
      sum += weight * in_.raw().l[at];
      for (size_t c = 0; c < dim; ++c) merged.o[c] += weight * in_.raw().o[at * dim + c];
    }
    for (double& x : merged.o) x /= sum;
    merged.lse = top + std::log(sum);
    return merged;
  }

  const PlanesInputs& in_;
  const PlanesOutputs& got_;
  PlanesCounts counts_;
};

}  // namespace kvstrata::cuda
