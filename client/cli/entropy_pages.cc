// SPDX-License-Identifier: Apache-2.0
#include "client/cli/entropy_pages.h"

#include <span>

namespace kvstrata::cli {
namespace {

struct Page {
  double mean = 0, variance = 0;  // over the population
};

Page PageOf(std::span<const float> entropies) {
  Page page;
  const auto n = static_cast<double>(entropies.size());
  for (const float h : entropies) page.mean += double{h} / n;
  for (const float h : entropies) page.variance += (h - page.mean) * (h - page.mean) / n;
  return page;
}

void AddPages(const Trace& trace, std::vector<Page>* pages) {
  constexpr int32_t kPage = EntropyPages::kPage;
  const std::span<const float> entropy(trace.entropy());
  const int32_t past = trace.shape().prompt % kPage;
  for (size_t t = past == 0 ? 0 : static_cast<size_t>(kPage - past); t + kPage <= entropy.size();
       t += kPage) {
    pages->push_back(PageOf(entropy.subspan(t, kPage)));
  }
}

}  // namespace

EntropyPages MeasureEntropyPages(const std::vector<Trace>& traces) {
  EntropyPages out;
  bool any = false;
  std::vector<Page> pages;
  for (const Trace& trace : traces) {
    any = any || !trace.entropy().empty();
    AddPages(trace, &pages);
  }
  if (pages.empty()) {
    out.status = any ? "too short: no page of 32 generated tokens" : "not in the trace: entropy";
    return out;
  }
  for (const Page& page : pages) {
    out.means.Add(page.mean);
    out.variances.Add(page.variance);
  }
  out.thresholds = {out.means.Percentile(EntropyPages::kPercentile),
                    out.variances.Percentile(EntropyPages::kPercentile)};
  for (const Page& page : pages) {
    const bool over = page.mean > out.thresholds[0] && page.variance > out.thresholds[1];
    out.share_over += over ? 1.0 / static_cast<double>(pages.size()) : 0;
  }
  return out;
}

}  // namespace kvstrata::cli
