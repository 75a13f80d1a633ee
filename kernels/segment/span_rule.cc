// SPDX-License-Identifier: Apache-2.0
#include "kernels/segment/span_rule.h"

#include <algorithm>
#include <cmath>

namespace kvstrata {
namespace {

constexpr double kAnchorSlack = 1e-6;  // nats

bool IsAnchor(std::span<const float> surprisal, int32_t t, double threshold) {
  return t == 0 || SurprisalAt(surprisal, t) > threshold;
}

}  // namespace

bool HasSurprisal(std::span<const float> surprisal, Run range) {
  if (range.end > static_cast<int64_t>(surprisal.size())) return false;
  for (int32_t t = std::max(range.begin, 1); t < range.end; ++t) {
    if (std::isnan(surprisal[static_cast<size_t>(t)])) return false;
  }
  return true;
}

double SurprisalAt(std::span<const float> surprisal, int32_t t) {
  return t == 0 ? 0.0 : double{surprisal[static_cast<size_t>(t)]};
}

double AnchorThreshold(std::span<const float> surprisal, int32_t prompt, double alpha) {
  double sum = 0;
  for (int32_t t = 0; t < prompt; ++t) sum += SurprisalAt(surprisal, t);
  const double mean = sum / prompt;
  double squares = 0;
  for (int32_t t = 0; t < prompt; ++t) {
    const double x = SurprisalAt(surprisal, t) - mean;
    squares += x * x;
  }
  return mean + alpha * std::sqrt(squares / prompt) + kAnchorSlack;
}

std::vector<int32_t> AnchorsIn(std::span<const float> surprisal, Run range, double threshold) {
  std::vector<int32_t> anchors;
  for (int32_t t = range.begin; t < range.end; ++t) {
    if (IsAnchor(surprisal, t, threshold)) anchors.push_back(t);
  }
  return anchors;
}

std::vector<Run> SpansIn(std::span<const float> surprisal, Run range, double threshold,
                         int32_t l_min) {
  std::vector<Run> spans;
  int32_t begin = range.begin;
  for (int32_t t = range.begin; t <= range.end; ++t) {
    if (t < range.end && !IsAnchor(surprisal, t, threshold)) continue;
    if (t - begin >= std::max(l_min, 1)) spans.push_back({begin, t});
    begin = t + 1;
  }
  return spans;
}

std::vector<int32_t> PositionsBetween(Run range, std::span<const Run> spans) {
  std::vector<int32_t> positions;
  int32_t t = range.begin;
  for (const Run& s : spans) {
    for (; t < s.begin; ++t) positions.push_back(t);
    t = s.end;
  }
  for (; t < range.end; ++t) positions.push_back(t);
  return positions;
}

}  // namespace kvstrata
