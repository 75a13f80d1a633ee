// SPDX-License-Identifier: Apache-2.0
// The text of /metrics: as Prometheus' format and OpenMetrics have it, in the order of the table.
#include "server/telemetry/metric_text.h"

#include <gtest/gtest.h>

#include <cmath>

#include "server/web/pages.h"

namespace kvstrata {
namespace {

// The lines of one metric, without the others'.
std::string PartOf(const std::string& page, const std::string& name) {
  const size_t begin = page.find("# HELP " + name + " ");
  EXPECT_NE(begin, page.npos) << name;
  return page.substr(begin, page.find("# HELP ", begin + 1) - begin);
}

TEST(MetricTextTest, TellsEveryMetricOfTheTableInItsOrder) {
  const std::string page = MetricText().Page(MetricFormat::kPrometheus);
  size_t at = 0;
  for (const Metric& metric : AllMetrics()) {
    const size_t found = page.find("# HELP " + std::string(metric.name) + " ");
    ASSERT_NE(found, page.npos) << metric.name;
    EXPECT_GE(found, at) << metric.name;
    at = found;
  }
}

TEST(MetricTextTest, WritesSamples) {
  MetricText text;
  text.Add("kvstrata_pool_used_bytes", {{"tier", "device"}, {"device", "a\\b\"c\nd"}},
           uint64_t{1} << 60);
  text.Add("kvstrata_recall_ratio", {{"plan", "quest"}}, 0.5);
  text.Add("kvstrata_recall_ratio", {{"plan", "chess"}}, std::nan(""));
  text.Add("kvstrata_sessions", {}, uint64_t{0});
  const std::string page = text.Page(MetricFormat::kPrometheus);
  EXPECT_EQ(PartOf(page, "kvstrata_pool_used_bytes"),
            "# HELP kvstrata_pool_used_bytes Pages, index blocks and extents that something refers "
            "to.\n# TYPE kvstrata_pool_used_bytes gauge\n"
            "kvstrata_pool_used_bytes{tier=\"device\",device=\"a\\\\b\\\"c\\nd\"} "
            "1152921504606846976\n");
  EXPECT_NE(page.find("\nkvstrata_recall_ratio{plan=\"quest\"} 0.5\n"), page.npos);
  EXPECT_NE(page.find("\nkvstrata_recall_ratio{plan=\"chess\"} NaN\n"), page.npos);
  EXPECT_NE(page.find("\nkvstrata_sessions 0\n"), page.npos);
}

TEST(MetricTextTest, BucketsOfAHistogramAddUp) {
  LatencyHistogram times;
  times.counts[0] = 2;
  times.counts[1] = 3;
  times.counts[kLatencyBounds] = 1;
  times.sum_us = 2'500'000;
  MetricText text;
  text.Add("kvstrata_duration_seconds", {{"what", "open"}}, times);
  const std::string part =
      PartOf(text.Page(MetricFormat::kPrometheus), "kvstrata_duration_seconds");
  const std::string bucket = "kvstrata_duration_seconds_bucket{what=\"open\",le=\"";
  EXPECT_NE(part.find(bucket + "1.6e-05\"} 2\n"), part.npos) << part;
  EXPECT_NE(part.find(bucket + "6.4e-05\"} 5\n"), part.npos) << part;
  EXPECT_NE(part.find(bucket + "67.108864\"} 5\n"), part.npos) << part;
  EXPECT_NE(part.find(bucket + "+Inf\"} 6\n"), part.npos) << part;
  EXPECT_NE(part.find("kvstrata_duration_seconds_sum{what=\"open\"} 2.5\n"), part.npos) << part;
  EXPECT_NE(part.find("kvstrata_duration_seconds_count{what=\"open\"} 6\n"), part.npos) << part;
}

TEST(MetricTextTest, OpenMetricsNamesFamiliesAndEnds) {
  MetricText text;
  text.Add("kvstrata_publications_total", {}, uint64_t{7});
  const std::string page = text.Page(MetricFormat::kOpenMetrics);
  EXPECT_NE(page.find("# TYPE kvstrata_publications counter\nkvstrata_publications_total 7\n"),
            page.npos);
  EXPECT_TRUE(page.ends_with("\n# EOF\n"));
}

TEST(MetricTextDeathTest, WhatTheTableHasNotIsABug) {
  MetricText text;
  EXPECT_DEATH(text.Add("kvstrata_nothing", {}, uint64_t{1}), "broken invariant");
  EXPECT_DEATH(text.Add("kvstrata_sessions", {{"user", "x"}}, uint64_t{1}), "broken invariant");
}

TEST(LabelCapTest, KeepsTheFirstNames) {
  LabelCap cap(2);
  EXPECT_EQ(cap.Of("uid:1"), "uid:1");
  EXPECT_EQ(cap.Of("uid:2"), "uid:2");
  EXPECT_EQ(cap.Of("uid:3"), "other");
  EXPECT_EQ(cap.Of("uid:1"), "uid:1");
  EXPECT_EQ(cap.Of("uid:3"), "other");
}

}  // namespace
}  // namespace kvstrata
