// SPDX-License-Identifier: Apache-2.0
// MetricText: one scrape's page, in Prometheus' text format 0.0.4 or OpenMetrics 1.0. Samples are
// given in any order and told by metric, in the order of the table (metric_table.h).
//
// Ours rather than a library's: the format is twenty lines, the table is the registry, and Debian's
// prometheus-cpp brings an HTTP server and curl. Thread-safety: one thread. Cost: appends to a
// string for each metric.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/telemetry/metric_table.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {

enum class MetricFormat { kPrometheus, kOpenMetrics };

class MetricText {
 public:
  using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

  MetricText();

  // REQUIRES: the table has the metric, with these labels in this order.
  void Add(std::string_view name, Labels labels, uint64_t value);
  void Add(std::string_view name, Labels labels, double value);
  void Add(std::string_view name, Labels labels, const LatencyHistogram& times);

  // The page: of each metric its help, its type and its samples.
  std::string Page(MetricFormat format) const;
  static std::string_view ContentType(MetricFormat format);

 private:
  std::string& SamplesOf(std::string_view name, MetricType type, Labels labels);

  std::vector<std::string> samples_;  // lines, by row of the table
};

}  // namespace kvstrata
