// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/metric_text.h"

#include <charconv>
#include <cmath>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr std::string_view kTotal = "_total";

void AppendEscaped(std::string_view text, std::string* to) {
  for (const char c : text) {
    if (c == '\n') {
      *to += "\\n";
      continue;
    }
    if (c == '\\' || c == '"') *to += '\\';
    *to += c;
  }
}

// {tier="device",device="emulated"}; `le` is a histogram's bound, "": none.
void AppendLabels(MetricText::Labels labels, std::string_view le, std::string* to) {
  if (labels.size() == 0 && le.empty()) return;
  char separator = '{';
  const auto append = [&](std::string_view name, std::string_view value) {
    *to += std::exchange(separator, ',');
    *to += name;
    *to += "=\"";
    AppendEscaped(value, to);
    *to += '"';
  };
  for (const auto& [name, value] : labels) append(name, value);
  if (!le.empty()) append("le", le);
  *to += '}';
}

std::string NumberText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Inf" : "+Inf";
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

std::string_view TypeText(MetricType type) {
  static constexpr std::string_view kNames[] = {"counter", "gauge", "histogram"};
  return kNames[static_cast<size_t>(type)];
}

// "tier,device" against the labels that are given.
bool HasLabels(const Metric& metric, MetricText::Labels labels) {
  std::string names;
  for (const auto& [name, value] : labels) names += (names.empty() ? "" : ",") + std::string(name);
  return names == metric.labels;
}

constexpr double kUsPerSecond = 1e6;

}  // namespace

MetricText::MetricText() : samples_(AllMetrics().size()) {}

std::string& MetricText::SamplesOf(std::string_view name, MetricType type, Labels labels) {
  const std::optional<size_t> at = FindMetric(name);
  KVS_CHECK(at.has_value());
  const Metric& metric = AllMetrics()[*at];
  KVS_CHECK((metric.type == MetricType::kHistogram) == (type == MetricType::kHistogram));
  KVS_CHECK(HasLabels(metric, labels));
  return samples_[*at];
}

void MetricText::Add(std::string_view name, Labels labels, uint64_t value) {
  std::string& to = SamplesOf(name, MetricType::kGauge, labels);
  to += name;
  AppendLabels(labels, "", &to);
  to += ' ' + std::to_string(value) + '\n';
}

void MetricText::Add(std::string_view name, Labels labels, double value) {
  std::string& to = SamplesOf(name, MetricType::kGauge, labels);
  to += name;
  AppendLabels(labels, "", &to);
  to += ' ' + NumberText(value) + '\n';
}

void MetricText::Add(std::string_view name, Labels labels, const LatencyHistogram& times) {
  std::string& to = SamplesOf(name, MetricType::kHistogram, labels);
  const auto line = [&](std::string_view suffix, std::string_view le, const std::string& value) {
    to += name;
    to += suffix;
    AppendLabels(labels, le, &to);
    to += ' ' + value + '\n';
  };
  uint64_t until = 0;  // buckets are cumulative
  for (size_t i = 0; i < kLatencyBounds; ++i) {
    until += times.counts[i];
    const double bound = static_cast<double>(LatencyBoundUs(i)) / kUsPerSecond;
    line("_bucket", NumberText(bound), std::to_string(until));
  }
  const std::string count = std::to_string(times.count());
  line("_bucket", "+Inf", count);
  line("_sum", "", NumberText(static_cast<double>(times.sum_us) / kUsPerSecond));
  line("_count", "", count);
}

std::string MetricText::Page(MetricFormat format) const {
  const bool open = format == MetricFormat::kOpenMetrics;
  std::string page;
  for (size_t i = 0; i < samples_.size(); ++i) {
    const Metric& metric = AllMetrics()[i];
    std::string_view family = metric.name;
    // OpenMetrics names a counter's family without what its samples end in.
    if (open && family.ends_with(kTotal)) family.remove_suffix(kTotal.size());
    page += "# HELP " + std::string(family) + ' ' + std::string(metric.help) + '\n';
    page += "# TYPE " + std::string(family) + ' ' + std::string(TypeText(metric.type)) + '\n';
    page += samples_[i];
  }
  if (open) page += "# EOF\n";
  return page;
}

std::string_view MetricText::ContentType(MetricFormat format) {
  if (format == MetricFormat::kPrometheus) return "text/plain; version=0.0.4; charset=utf-8";
  return "application/openmetrics-text; version=1.0.0; charset=utf-8";
}

}  // namespace kvstrata
