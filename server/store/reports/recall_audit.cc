// SPDX-License-Identifier: Apache-2.0
#include "server/store/reports/recall_audit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace kvstrata {
namespace {

constexpr int kLowestOctave = -20;  // the first bin of errors ends at 2^-20

// REQUIRES: sorted and not empty; p in [0, 100].
double Percentile(const std::vector<float>& sorted, double p) {
  const double at = p / 100 * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (double{sorted[high]} - sorted[low]);
}

// The bin of x; values beyond the last bound fall into the last bin.
size_t BinOf(const std::vector<double>& bounds, float x) {
  const auto above = std::upper_bound(bounds.begin(), bounds.end(), double{x});
  const auto bin = static_cast<size_t>(above - bounds.begin());
  return std::clamp<size_t>(bin, 1, bounds.size() - 1) - 1;
}

RecallMetric MetricOf(std::vector<float> values, const std::vector<double>& bounds) {
  RecallMetric m;
  m.samples = values.size();
  m.histogram.resize(bounds.size() - 1);
  if (values.empty()) return m;
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const float x : values) {
    sum += x;
    ++m.histogram[BinOf(bounds, x)];
  }
  m.mean = sum / static_cast<double>(values.size());
  m.p5 = Percentile(values, 5);
  m.p50 = Percentile(values, 50);
  m.p95 = Percentile(values, 95);
  m.min = values.front();
  m.max = values.back();
  return m;
}

Status Complete() {
  return {Code::kAborted, "RECALL_COMPLETE", "the audit has all the steps that it wanted"};
}

}  // namespace

std::vector<double> RecallBounds() {
  std::vector<double> bounds;
  for (int i = 0; i <= kRecallBins; ++i) bounds.push_back(static_cast<double>(i) / kRecallBins);
  return bounds;
}

std::vector<double> ErrorBounds() {
  std::vector<double> bounds = {0};
  for (int i = 0; i < kErrorBins - 1; ++i) bounds.push_back(std::ldexp(1.0, kLowestOctave + i));
  bounds.push_back(double{std::numeric_limits<float>::max()});
  return bounds;
}

RecallAudit::RecallAudit(uint32_t number, const RecallOptions& options, int32_t layers,
                         int32_t heads, Listener listener)
    : number_(number),
      options_(options),
      layers_(layers),
      heads_(heads),
      listener_(std::move(listener)) {
  progress_.wanted = options.steps;
}

Status RecallAudit::Check(const RecallSamples& s) const {
  const auto impossible = [](const std::string& what) {
    return Status(Code::kDataLoss, "RECALL_SAMPLE",
                  what + "; daemon and library differ, or the client is broken");
  };
  if (s.heads != heads_) {
    return impossible("a step says that it has " + std::to_string(s.heads) + " query heads for " +
                      std::to_string(heads_));
  }
  const size_t n = s.layers.size() * static_cast<size_t>(heads_);
  if (s.layers.empty() || s.recall.size() != n || s.error.size() != n || s.position < 0) {
    return impossible("a step measured no layer, or lacks samples of one");
  }
  for (size_t i = 0; i < s.layers.size(); ++i) {
    const int32_t before = i == 0 ? -1 : s.layers[i - 1];
    if (s.layers[i] > before && s.layers[i] < layers_) continue;
    return impossible("a step names layer " + std::to_string(s.layers[i]) + " after " +
                      std::to_string(before) + " of " + std::to_string(layers_));
  }
  const bool possible =
      std::ranges::all_of(s.recall, [](float x) { return x >= 0 && x <= 1; }) &&
      std::ranges::all_of(s.error, [](float x) { return x >= 0 && std::isfinite(x); });
  return possible ? OkStatus() : impossible("a recall is not in [0, 1], or an error not finite");
}

Status RecallAudit::Add(const RecallSamples& s) {
  KVS_RETURN_IF_ERROR(Check(s));
  Listener listener;
  bool complete = false;
  {
    MutexLock lock(mu_);
    if (ended_ || progress_.steps == progress_.wanted) return Complete();
    const auto heads = static_cast<ptrdiff_t>(heads_);
    for (size_t i = 0; i < s.layers.size(); ++i) {
      Samples& to = by_layer_[s.layers[i]];
      const auto first = static_cast<ptrdiff_t>(i) * heads;
      const auto append = [&](std::span<const float> from, std::vector<float>* out) {
        out->insert(out->end(), from.begin() + first, from.begin() + first + heads);
      };
      append(s.recall, &to.recall);
      append(s.error, &to.error);
    }
    if (progress_.steps++ == 0) progress_.first_position = s.position;
    progress_.last_position = s.position;
    progress_.dropped = std::max(progress_.dropped, s.dropped);
    complete = progress_.steps == progress_.wanted;
    listener = listener_;
  }
  if (complete) return Complete();  // its End tells the listener
  if (listener) listener();
  return OkStatus();
}

void RecallAudit::End(const Status& why) {
  Listener listener;
  {
    MutexLock lock(mu_);
    if (ended_) return;
    ended_ = true;
    why_ = why;
    listener = std::exchange(listener_, nullptr);
  }
  if (listener) listener();
}

bool RecallAudit::Ended(Status* why) const {
  MutexLock lock(mu_);
  if (ended_) *why = why_;
  return ended_;
}

RecallProgress RecallAudit::Progress() const {
  MutexLock lock(mu_);
  return progress_;
}

RecallReport RecallAudit::Report() const {
  std::map<int32_t, Samples> by_layer;
  RecallReport report;
  {
    MutexLock lock(mu_);
    report.progress = progress_;
    by_layer = by_layer_;
  }
  const std::vector<double> recall_bounds = RecallBounds(), error_bounds = ErrorBounds();
  Samples all;
  for (auto& [layer, samples] : by_layer) {
    all.recall.insert(all.recall.end(), samples.recall.begin(), samples.recall.end());
    all.error.insert(all.error.end(), samples.error.begin(), samples.error.end());
    report.layers.push_back({layer, MetricOf(std::move(samples.recall), recall_bounds),
                             MetricOf(std::move(samples.error), error_bounds)});
  }
  report.all = {-1, MetricOf(std::move(all.recall), recall_bounds),
                MetricOf(std::move(all.error), error_bounds)};
  return report;
}

}  // namespace kvstrata
