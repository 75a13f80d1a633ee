// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/span_gates.h"

#include <algorithm>
#include <cmath>

namespace kvstrata {
namespace {

// Where GELU is least, and what it is there.
constexpr double kGeluLowestAt = -0.7517915, kGeluLowest = -0.17;

double Gelu(double x) { return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0))); }

double Sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x >= 0 ? 1.0 : e) / (1 + e);
}

// k / |k|; 0 of 0.
std::vector<double> Direction(std::span<const BF16> k) {
  double norm = 0;
  for (const BF16 x : k) norm += double{ToFloat(x)} * double{ToFloat(x)};
  norm = std::sqrt(norm);
  std::vector<double> out;
  for (const BF16 x : k) out.push_back(norm > 0 ? double{ToFloat(x)} / norm : double{ToFloat(x)});
  return out;
}

// Sums of w x and of |w| y. Four of each at a time, which do not wait for one another.
struct Sums {
  double signed_sum = 0, absolute = 0;
};
Sums SumsOf(const float* w, const std::vector<double>& x, const std::vector<double>& y) {
  constexpr size_t kLanes = 4;
  double sums[kLanes] = {}, absolutes[kLanes] = {};
  const size_t whole = x.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) {
      sums[l] += double{w[i + l]} * x[i + l];
      absolutes[l] += std::abs(double{w[i + l]}) * y[i + l];
    }
  }
  Sums all = {(sums[0] + sums[1]) + (sums[2] + sums[3]),
              (absolutes[0] + absolutes[1]) + (absolutes[2] + absolutes[3])};
  for (size_t i = whole; i < x.size(); ++i) {
    all.signed_sum += double{w[i]} * x[i];
    all.absolute += std::abs(double{w[i]}) * y[i];
  }
  return all;
}

// Units of a layer, each at most `radius` from its middle.
struct Bounds {
  std::vector<double> middle, radius;

  void Add(double low, double high) {
    middle.push_back((low + high) / 2);
    radius.push_back((high - low) / 2);
  }
};

// Bounds of the first layer, whatever the spectrum. s / s_1 falls from 1 to 0 or is 0 throughout,
// so it is a mixture of its own prefixes of ones, and a sum over it lies between theirs.
Bounds FirstLayer(int32_t rank, const std::vector<double>& direction, const SpanParameters& p) {
  Bounds units;
  const auto r_max = static_cast<size_t>(p.r_max);
  const std::vector<double> nothing(direction.size());
  const float* w = p.weight[0].data();
  for (const float bias : p.bias[0]) {
    double prefix = 0, least = 0, most = 0;
    for (int32_t i = 0; i < rank; ++i) {
      prefix += double{w[i]};
      least = std::min(least, prefix);
      most = std::max(most, prefix);
    }
    const double rest = bias + SumsOf(w + r_max, direction, nothing).signed_sum;
    units.Add(rest + least, rest + most);
    w += r_max + direction.size();
  }
  return units;
}

Bounds GeluOf(const Bounds& x) {
  Bounds y;
  for (size_t i = 0; i < x.middle.size(); ++i) {
    const double from = x.middle[i] - x.radius[i], to = x.middle[i] + x.radius[i];
    const double low = Gelu(from), high = Gelu(to);
    const bool turns = from < kGeluLowestAt && to > kGeluLowestAt;
    y.Add(turns ? kGeluLowest : std::min(low, high), std::max(low, high));
  }
  return y;
}

// Bounds of the first `out` units of a layer.
Bounds NextLayer(const Bounds& x, size_t out, const std::vector<float>& weight,
                 const std::vector<float>& bias) {
  Bounds y;
  const float* w = weight.data();
  for (size_t o = 0; o < out; ++o, w += x.middle.size()) {
    const Sums sums = SumsOf(w, x.middle, x.radius);
    y.middle.push_back(bias[o] + sums.signed_sum);
    y.radius.push_back(sums.absolute);
  }
  return y;
}

}  // namespace

std::vector<double> SpanGates(std::span<const float> spectrum, std::span<const BF16> k_mean,
                              const SpanParameters* parameters) {
  if (parameters == nullptr) return std::vector<double>(spectrum.size(), 1.0);
  std::vector<double> x(static_cast<size_t>(parameters->r_max));
  const double largest = spectrum.front();
  for (size_t i = 0; i < spectrum.size(); ++i) {
    x[i] = largest > 0 ? double{spectrum[i]} / largest : double{spectrum[i]};
  }
  const std::vector<double> direction = Direction(k_mean);
  x.insert(x.end(), direction.begin(), direction.end());
  for (size_t layer = 0; layer < 3; ++layer) {
    const std::vector<float>& weight = parameters->weight[layer];
    const std::vector<float>& bias = parameters->bias[layer];
    if (layer > 0) std::ranges::transform(x, x.begin(), Gelu);
    std::vector<double> y(bias.begin(), bias.end());
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += double{weight[o * x.size() + i]} * x[i];
    }
    x = std::move(y);
  }
  x.resize(spectrum.size());
  std::ranges::transform(x, x.begin(), Sigmoid);
  return x;
}

int32_t SurelyKept(int32_t rank, std::span<const BF16> k_mean, const SpanParameters* parameters) {
  if (parameters == nullptr) return rank;
  constexpr double kRounding = 1e-6;  // difference of the two ways to add up
  const double floor = std::log(kGateFloor / (1 - kGateFloor)) + kRounding;
  const SpanParameters& p = *parameters;
  const Bounds first = GeluOf(FirstLayer(rank, Direction(k_mean), p));
  const Bounds second = GeluOf(NextLayer(first, p.bias[1].size(), p.weight[1], p.bias[1]));
  const Bounds logits = NextLayer(second, static_cast<size_t>(rank), p.weight[2], p.bias[2]);
  int32_t kept = 1;
  for (size_t i = 1; i < logits.middle.size(); ++i) {
    kept += int{logits.middle[i] - logits.radius[i] >= floor};
  }
  return kept;
}

}  // namespace kvstrata
