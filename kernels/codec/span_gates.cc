#include "kernels/codec/span_gates.h"

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

// Bounds of a layer's units.
struct Interval {
  std::vector<double> low, high;
};

// Of the first layer, whatever the spectrum. s / s_1 descends from 1 to 0 or is 0 throughout, so
// it is a mixture of its own prefixes of ones, and a sum over it lies between theirs.
Interval FirstLayer(int32_t rank, std::span<const double> direction, const SpanParameters& p) {
  Interval units;
  const auto r_max = static_cast<size_t>(p.r_max);
  const float* w = p.weight[0].data();
  for (const float bias : p.bias[0]) {
    double prefix = 0, least = 0, most = 0, rest = bias;
    for (int32_t i = 0; i < rank; ++i) {
      prefix += double{w[i]};
      least = std::min(least, prefix);
      most = std::max(most, prefix);
    }
    for (size_t c = 0; c < direction.size(); ++c) rest += double{w[r_max + c]} * direction[c];
    units.low.push_back(rest + least);
    units.high.push_back(rest + most);
    w += r_max + direction.size();
  }
  return units;
}

Interval GeluOf(const Interval& x) {
  Interval y;
  for (size_t i = 0; i < x.low.size(); ++i) {
    const double low = Gelu(x.low[i]), high = Gelu(x.high[i]);
    const bool turns = x.low[i] < kGeluLowestAt && x.high[i] > kGeluLowestAt;
    y.low.push_back(turns ? kGeluLowest : std::min(low, high));
    y.high.push_back(std::max(low, high));
  }
  return y;
}

// Of the first `out` units of a layer.
Interval NextLayer(const Interval& x, size_t out, const std::vector<float>& weight,
                   const std::vector<float>& bias) {
  Interval y;
  const float* w = weight.data();
  for (size_t o = 0; o < out; ++o, w += x.low.size()) {
    double low = bias[o], high = bias[o];
    for (size_t i = 0; i < x.low.size(); ++i) {
      const double by = w[i];
      low += by * (by < 0 ? x.high[i] : x.low[i]);
      high += by * (by < 0 ? x.low[i] : x.high[i]);
    }
    y.low.push_back(low);
    y.high.push_back(high);
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
  constexpr double kRounding = 1e-6;  // of the two ways to add up
  const double floor = std::log(kGateFloor / (1 - kGateFloor)) + kRounding;
  const SpanParameters& p = *parameters;
  const Interval first = GeluOf(FirstLayer(rank, Direction(k_mean), p));
  const Interval second = GeluOf(NextLayer(first, p.bias[1].size(), p.weight[1], p.bias[1]));
  const Interval logits = NextLayer(second, static_cast<size_t>(rank), p.weight[2], p.bias[2]);
  int32_t kept = 1;
  for (size_t i = 1; i < logits.low.size(); ++i) kept += int{logits.low[i] >= floor};
  return kept;
}

}  // namespace kvstrata
