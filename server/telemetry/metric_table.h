// SPDX-License-Identifier: Apache-2.0
// The table of metrics: every one that /metrics tells, by its name, with what it counts. One table:
// the page, docs/metrics.md and the checks of docker/prometheus and docker/grafana go by it.
// tests/tree/check_metrics.py proves that it has what the code tells.
//
// Static data; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

namespace kvstrata {

enum class MetricType { kCounter, kGauge, kHistogram };

struct Metric {
  std::string_view name;  // "kvstrata_pool_used_bytes"
  MetricType type;
  std::string_view unit;    // "bytes", "seconds", "tokens", ...; "": a number
  std::string_view labels;  // their names, with a comma between; "": none
  std::string_view help;    // a sentence
};

// All, in the order in which they are told.
std::span<const Metric> AllMetrics();

// Its place in AllMetrics(). Cost: a look at each row, at most.
std::optional<size_t> FindMetric(std::string_view name);

}  // namespace kvstrata
