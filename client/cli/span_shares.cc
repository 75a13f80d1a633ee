// SPDX-License-Identifier: Apache-2.0
#include "client/cli/span_shares.h"

#include <algorithm>
#include <cmath>

namespace kvstrata::cli {
namespace {

constexpr double kAnchorSlack = 1e-6;  // nats to exceed the threshold by

double Threshold(std::span<const float> surprisal, double alpha) {
  const auto n = static_cast<double>(surprisal.size());
  double mean = 0, square = 0;
  for (const float h : surprisal) mean += h;
  mean /= n;
  for (const float h : surprisal) square += (h - mean) * (h - mean);
  return mean + alpha * std::sqrt(square / n) + kAnchorSlack;
}

std::vector<LengthBin> EmptyBins() {
  std::vector<LengthBin> bins;
  for (int32_t from = kShortestSpan; from < 1024; from *= 2) bins.push_back({from, from * 2});
  bins.push_back({bins.back().to, 0});
  return bins;
}

void AddLength(int32_t length, std::vector<LengthBin>* bins) {
  const auto bin = std::ranges::find_if(
      *bins, [length](const LengthBin& b) { return b.to == 0 || length < b.to; });
  ++bin->spans;
  bin->tokens += length;
}

// Counts until ShareOf divides them.
struct Counts {
  int64_t anchors = 0, persistent = 0;
};

void AddPrompt(const Trace& trace, AlphaShare* share, Counts* counts) {
  const auto prompt = static_cast<int64_t>(trace.surprisal().size());
  const Spans all = CutSpans(trace.surprisal(), share->alpha, kShortestSpan, 0);
  counts->anchors += all.anchors;
  counts->persistent += prompt - all.tokens() + static_cast<int64_t>(all.spans.size());
  share->spans += static_cast<int64_t>(all.spans.size());
  for (const auto& [from, to] : all.spans) AddLength(to - from, &share->lengths);
  // Generated tokens stay raw: the share is largest at the last step.
  const Spans used = CutSpans(trace.surprisal(), share->alpha, kShortestSpan, kLocalWindow);
  const int64_t rows =
      trace.shape().tokens() - used.tokens() + static_cast<int64_t>(used.spans.size());
  share->budget_rows = std::max(share->budget_rows, rows);
  share->budget_share = std::max(
      share->budget_share, static_cast<double>(rows) / static_cast<double>(trace.shape().tokens()));
}

AlphaShare ShareOf(const std::vector<const Trace*>& traces, double alpha, int64_t tokens) {
  AlphaShare share{.alpha = alpha, .lengths = EmptyBins()};
  Counts counts;
  for (const Trace* trace : traces) AddPrompt(*trace, &share, &counts);
  share.anchor_share = static_cast<double>(counts.anchors) / static_cast<double>(tokens);
  share.persistent_share = static_cast<double>(counts.persistent) / static_cast<double>(tokens);
  return share;
}

}  // namespace

int64_t Spans::tokens() const {
  int64_t sum = 0;
  for (const auto& [from, to] : spans) sum += to - from;
  return sum;
}

Spans CutSpans(std::span<const float> surprisal, double alpha, int32_t shortest, int32_t local) {
  Spans out;
  const auto n = static_cast<int32_t>(surprisal.size());
  const int32_t window = std::max(n - local, 0);
  const double threshold = Threshold(surprisal, alpha);
  int32_t anchor = -1;  // the last one
  const auto cut = [&](int32_t end) {
    if (anchor >= 0 && end - anchor - 1 >= std::max(shortest, 1)) {
      out.spans.push_back({anchor + 1, end});
    }
    anchor = end;
  };
  for (int32_t t = 0; t < n; ++t) {
    if (t > 0 && !(double{surprisal[static_cast<size_t>(t)]} > threshold)) continue;
    ++out.anchors;
    if (t < window) cut(t);
  }
  cut(window);
  return out;
}

SpanShares MeasureSpanShares(const std::vector<Trace>& traces) {
  SpanShares out;
  std::vector<const Trace*> with;
  for (const Trace& trace : traces) {
    if (trace.surprisal().empty()) continue;
    with.push_back(&trace);
    out.tokens += trace.shape().prompt;
  }
  if (with.empty()) {
    out.status = "not in the trace: surprisal";
    return out;
  }
  for (const double alpha : kAlphas) out.alphas.push_back(ShareOf(with, alpha, out.tokens));
  return out;
}

}  // namespace kvstrata::cli
