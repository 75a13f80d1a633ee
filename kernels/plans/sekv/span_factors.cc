// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/span_factors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/codec/row_floats.h"
#include "kernels/plans/sekv/ops/span_ops.h"
#include "kernels/plans/sekv/span_gates.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {
namespace {

// Surprisal over its sum; uniform if that is 0.
std::vector<double> Weights(std::span<const float> surprisal, Run tokens) {
  std::vector<double> weights;
  for (int32_t t = tokens.begin; t < tokens.end; ++t) weights.push_back(SurprisalAt(surprisal, t));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& w : weights) w = sum > 0 ? w / sum : 1.0 / static_cast<double>(weights.size());
  return weights;
}

// A span's rows as one matrix [n][dim].
std::vector<float> Gather(const PagedRows& rows, Run tokens) {
  std::vector<float> x(static_cast<size_t>(tokens.end - tokens.begin) *
                       static_cast<size_t>(rows.dim));
  float* out = x.data();
  for (int32_t t = tokens.begin; t < tokens.end; ++t, out += rows.dim) WidenRow(rows, t, out);
  return x;
}

std::vector<BF16> Rounded(const std::vector<float>& x) {
  std::vector<BF16> out(x.size());
  std::ranges::transform(x, out.begin(), [](float v) { return FromFloat<BF16>(v); });
  return out;
}

std::vector<BF16> WeightedMean(const std::vector<float>& x, const std::vector<double>& weights) {
  const size_t dim = x.size() / weights.size();
  std::vector<double> mean(dim);
  for (size_t i = 0; i < weights.size(); ++i) {
    for (size_t c = 0; c < dim; ++c) mean[c] += weights[i] * double{x[i * dim + c]};
  }
  std::vector<BF16> out(dim);
  std::ranges::transform(mean, out.begin(),
                         [](double v) { return FromFloat<BF16>(static_cast<float>(v)); });
  return out;
}

struct Spectrum {
  int32_t rank = 0;
  std::vector<float> u, s, vt;  // [n][rank], [rank], [rank][dim]
};

Spectrum Decompose(const std::vector<float>& x, int32_t n, int32_t dim, int32_t rank,
                   const Backend& backend) {
  Spectrum d;
  d.rank = rank;
  d.u.resize(static_cast<size_t>(n) * static_cast<size_t>(rank));
  d.s.resize(static_cast<size_t>(rank));
  d.vt.resize(static_cast<size_t>(rank) * static_cast<size_t>(dim));
  const SvdWork work{x.data(), n, dim, rank, d.u.data(), d.s.data(), d.vt.data()};
  OpsOf<SpanOps>(backend.lowrank).svd(&work, 1, InlineExecutor());
  return d;
}

// A = U diag(g s) and B = V^T of the components that are kept.
FactorRows KeptComponents(const Spectrum& d, const std::vector<double>& gates,
                          const std::vector<int32_t>& kept) {
  FactorRows rows;
  rows.rank = static_cast<int32_t>(kept.size());
  const auto rank = static_cast<size_t>(d.rank);
  const size_t n = d.u.size() / rank, dim = d.vt.size() / rank;
  for (size_t i = 0; i < n; ++i) {
    for (const int32_t j : kept) {
      const auto k = static_cast<size_t>(j);
      const double x = double{d.u[i * rank + k]} * (gates[k] * double{d.s[k]});
      rows.left.push_back(FromFloat<BF16>(static_cast<float>(x)));
    }
  }
  for (const int32_t j : kept) {
    const float* row = d.vt.data() + static_cast<size_t>(j) * dim;
    for (size_t c = 0; c < dim; ++c) rows.right.push_back(FromFloat<BF16>(row[c]));
  }
  return rows;
}

// |X - X^|_F / |X|_F of the kept components, gates included, before rounding.
double LossOf(const std::vector<float>& x, const Spectrum& d, const std::vector<double>& gates,
              const std::vector<int32_t>& kept) {
  const double all = std::inner_product(
      x.begin(), x.end(), x.begin(), 0.0, [](double sum, double y) { return sum + y; },
      [](float a, float b) { return double{a} * double{b}; });
  double lost = all;
  for (const int32_t j : kept) {
    const double s = d.s[static_cast<size_t>(j)], missing = 1 - gates[static_cast<size_t>(j)];
    lost -= s * s * (1 - missing * missing);
  }
  return all == 0 ? 0 : std::sqrt((lost < 0 ? 0.0 : lost) / all);  // NaN stays NaN
}

// `surely`: what SurelyKept says of it.
FactorRows Compress(const std::vector<float>& x, int32_t dim, std::span<const BF16> k_mean,
                    int32_t surely, const Plan& plan, const SpanParameters* parameters,
                    const Backend& backend) {
  const auto n = static_cast<int32_t>(x.size() / static_cast<size_t>(dim));
  const int32_t rank = std::min({n, dim, plan.lowrank.r_max});
  const auto is_smaller = [&](int64_t r) { return r * (n + dim) < int64_t{n} * dim; };
  FactorRows raw{-1, false, Rounded(x), {}};
  // Most spans are short, and their factors no smaller even where gates drop all that they may.
  if (!is_smaller(surely)) return raw;
  const Spectrum d = Decompose(x, n, dim, rank, backend);
  const std::vector<double> gates = SpanGates(d.s, k_mean, parameters);
  std::vector<int32_t> kept;
  for (int32_t j = 0; j < rank; ++j) {
    if (j == 0 || gates[static_cast<size_t>(j)] >= kGateFloor) kept.push_back(j);
  }
  if (!is_smaller(static_cast<int64_t>(kept.size()))) return raw;
  // What is not finite has no loss that could be within the limit.
  raw.refused = plan.stored.max_loss < 1 && !(LossOf(x, d, gates, kept) <= plan.stored.max_loss);
  return raw.refused ? raw : KeptComponents(d, gates, kept);
}

}  // namespace

SpanForm CompressSpan(const SpanSource& source, const Plan& plan, const SpanParameters* parameters,
                      const Backend& backend) {
  const std::vector<double> weights = Weights(source.surprisal, source.tokens);
  const std::vector<float> keys = Gather(source.keys, source.tokens);
  const std::vector<float> values = Gather(source.values, source.tokens);
  SpanForm form;
  form.k_mean = WeightedMean(keys, weights);
  form.v_mean = WeightedMean(values, weights);
  const int32_t dim = source.keys.dim;
  const int32_t n = source.tokens.end - source.tokens.begin;
  const int32_t surely =
      SurelyKept(std::min({n, dim, plan.lowrank.r_max}), form.k_mean, parameters);
  form.keys = Compress(keys, dim, form.k_mean, surely, plan, parameters, backend);
  form.values = Compress(values, dim, form.k_mean, surely, plan, parameters, backend);
  return form;
}

}  // namespace kvstrata
