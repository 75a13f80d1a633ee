// SPDX-License-Identifier: Apache-2.0
#include "client/cli/calibrate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"

namespace kvstrata::cli {
namespace {

// The decode queries of one layer of one trace.
class Queries {
 public:
  Queries(const TraceShape& shape, const TraceLayer& layer)
      : shape_(shape), first_(layer.q + shape.tail * shape.q_row()) {}

  double Flattened(int32_t a, int32_t b) const {
    const auto n = static_cast<size_t>(shape_.q_row());
    return Cosine({Row(a), n}, {Row(b), n});
  }
  double Smallest(int32_t a, int32_t b) const {
    const auto d = static_cast<size_t>(shape_.head_dim);
    double least = 1;
    for (int64_t h = 0; h < shape_.query_heads; ++h) {
      const int64_t at = h * shape_.head_dim;
      least = std::min(least, Cosine({Row(a) + at, d}, {Row(b) + at, d}));
    }
    return least;
  }

 private:
  const uint16_t* Row(int32_t t) const { return first_ + t * shape_.q_row(); }

  const TraceShape& shape_;
  const uint16_t* first_;
};

// How many of the steps reuse the selection of an earlier one.
template <typename Likeness>
int64_t Hits(int32_t steps, double theta, Likeness cosine) {
  int64_t hits = 0;
  int32_t selected = 0;
  for (int32_t t = 1; t < steps; ++t) {
    if (cosine(t, selected) >= theta) {
      ++hits;
    } else {
      selected = t;
    }
  }
  return hits;
}

struct Tally {
  std::map<int32_t, LayerCosines> layers;
  std::array<int64_t, kThetas.size()> flattened{}, per_head{};
  int64_t layer_steps = 0;
};

void AddLayer(const TraceShape& shape, const TraceLayer& layer, Tally* tally) {
  const Queries queries(shape, layer);
  LayerCosines& cosines = tally->layers[layer.layer];
  cosines.layer = layer.layer;
  for (int32_t t = 1; t < shape.steps; ++t) {
    cosines.flattened.Add(queries.Flattened(t, t - 1));
    cosines.smallest.Add(queries.Smallest(t, t - 1));
  }
  for (size_t i = 0; i < kThetas.size(); ++i) {
    tally->flattened[i] += Hits(shape.steps, kThetas[i],
                                [&](int32_t a, int32_t b) { return queries.Flattened(a, b); });
    tally->per_head[i] +=
        Hits(shape.steps, kThetas[i], [&](int32_t a, int32_t b) { return queries.Smallest(a, b); });
  }
  tally->layer_steps += shape.steps;
}

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

constexpr int32_t kSteps = 32;
constexpr const char* kPresets[] = {"quest", "chess", "tokenselect"};

Result<BreakEvenPoint> MeasurePoint(const Trace& trace, int32_t tokens, ReplayOptions options,
                                    const BreakEvenPlan& plan, const ReplayProgress& progress) {
  options.plans = {plan.plan};
  options.layers.clear();
  options.timing_only = true;
  const std::string name = plan.name + " at " + std::to_string(tokens) + " tokens: ";
  const auto report =
      Replay(trace.Prefix(tokens), options, [&](const char* phase, int32_t done, int32_t of) {
        progress((name + phase).c_str(), done, of);
      });
  if (!report.ok()) return report.status();
  const PlanReport& full = report->reference;
  const PlanReport& sparse = report->plans[0];
  return BreakEvenPoint{tokens, full.step_ms.Percentile(50), sparse.step_ms.Percentile(50),
                        sparse.costs.rows.Mean() < full.costs.rows.Mean()};
}

Status MeasurePlan(const Trace& trace, const ReplayOptions& options, const ReplayProgress& progress,
                   BreakEvenPlan* plan) {
  for (const int32_t tokens : BreakEvenLengths(trace.shape().prompt)) {
    const auto point = MeasurePoint(trace, tokens, options, *plan, progress);
    if (point.ok()) {
      plan->points.push_back(*point);
      continue;
    }
    if (!IsOfSection(point.status())) return point.status();
    plan->status = point.status().reason() + ": " + point.status().message();
    return OkStatus();
  }
  plan->tokens = BreakEvenLength(plan->points);
  return OkStatus();
}

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

constexpr const char* kOffline = "not measured: --offline";

// Those that decide what keys, values and queries mean. Optional ones count where both traces have
// them.
constexpr const char* kNeeded[] = {"layers", "query_heads", "kv_heads", "head_dim", "keys"};
constexpr const char* kOptional[] = {"model",      "digest",   "tokenizer",
                                     "rope_theta", "rope_dim", "rope_scaling"};

// What is measured of packing and spans holds for keys as codecs store them, rotated.
Status CheckStoredRotated(const std::vector<Trace>& traces, const std::vector<std::string>& names) {
  for (size_t i = 0; i < traces.size(); ++i) {
    if (traces[i].shape().rotary.dim == 0) continue;
    return Unimplemented("CALIBRATE_PRE_ROPE",
                         "trace '" + names[i] +
                             "' has __metadata__.keys 'pre_rope'; allowed: post_rope. Record the "
                             "model's keys after rotary embedding to calibrate it");
  }
  return OkStatus();
}

}  // namespace

QueryCosines MeasureQueryCosines(const std::vector<Trace>& traces) {
  QueryCosines out;
  Tally tally;
  for (const Trace& trace : traces) {
    if (trace.shape().steps < 2) continue;
    out.steps += trace.shape().steps;
    for (const TraceLayer& layer : trace.layers()) AddLayer(trace.shape(), layer, &tally);
  }
  if (tally.layer_steps == 0) {
    out.status = "not in the trace: two decode steps or more";
    return out;
  }
  for (auto& [number, cosines] : tally.layers) out.layers.push_back(std::move(cosines));
  const auto share = [&](int64_t hits) {
    return static_cast<double>(hits) / static_cast<double>(tally.layer_steps);
  };
  for (size_t i = 0; i < kThetas.size(); ++i) {
    out.hit_rates.push_back({kThetas[i], share(tally.flattened[i]), share(tally.per_head[i])});
  }
  return out;
}

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

std::optional<double> BreakEvenLength(const std::vector<BreakEvenPoint>& points) {
  const auto slower =
      std::find_if(points.rbegin(), points.rend(), [](const auto& p) { return !p.faster(); });
  const auto first = slower.base();  // from here on all are faster
  if (first == points.end()) return std::nullopt;
  if (first == points.begin() || !std::prev(first)->sparse) return first->tokens;
  const BreakEvenPoint& below = *std::prev(first);
  const double part = (below.ratio() - 1) / (below.ratio() - first->ratio());
  return below.tokens + part * (first->tokens - below.tokens);
}

std::vector<int32_t> BreakEvenLengths(int32_t prompt) {
  std::vector<int32_t> lengths;
  for (int64_t n = 512; n < prompt; n *= 2) lengths.push_back(static_cast<int32_t>(n));
  lengths.push_back(prompt);
  return lengths;
}

Result<BreakEven> MeasureBreakEven(const std::vector<Trace>& traces, const ReplayOptions& options,
                                   const ReplayProgress& progress) {
  BreakEven out;
  const auto prompt = [](const Trace& trace) {
    return trace.shape().steps == 0 ? 0 : trace.shape().prompt;
  };
  const auto longest = std::ranges::max_element(traces, {}, prompt);
  if (longest == traces.end() || prompt(*longest) == 0) {
    out.status = "not in the trace: decode steps";
    return out;
  }
  out.trace = static_cast<size_t>(longest - traces.begin());
  out.steps = std::min(kSteps, longest->shape().steps);
  ReplayOptions timed = options;
  timed.steps = out.steps;
  for (const char* preset : kPresets) {
    out.plans.push_back({preset, std::string(preset) + "{min_tokens = 0}"});
    KVS_RETURN_IF_ERROR(MeasurePlan(*longest, timed, progress, &out.plans.back()));
  }
  return out;
}

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

Status CheckSameModel(const std::vector<Trace>& traces, const std::vector<std::string>& names) {
  KVS_CHECK(!traces.empty() && traces.size() == names.size());
  const Trace& first = traces[0];
  for (size_t i = 1; i < traces.size(); ++i) {
    const auto compare = [&](const std::string& field, bool needed) {
      const std::string a = first.Metadata(field), b = traces[i].Metadata(field);
      if (a == b || (!needed && (a.empty() || b.empty()))) return OkStatus();
      return InvalidArgument("CALIBRATE_MODELS", "traces '" + names[0] + "' and '" + names[i] +
                                                     "' are of different models: __metadata__." +
                                                     field + " is '" + a + "' and '" + b +
                                                     "'; calibrate one model at a time");
    };
    for (const char* field : kNeeded) KVS_RETURN_IF_ERROR(compare(field, true));
    for (const char* field : kOptional) KVS_RETURN_IF_ERROR(compare(field, false));
  }
  return OkStatus();
}

Result<Calibration> Calibrate(const std::vector<Trace>& traces,
                              const std::vector<std::string>& names,
                              const CalibrateOptions& options, const ReplayProgress& progress) {
  KVS_RETURN_IF_ERROR(CheckSameModel(traces, names));
  KVS_RETURN_IF_ERROR(CheckStoredRotated(traces, names));
  Calibration out;
  out.entropy = MeasureEntropyPages(traces);
  out.spans = MeasureSpanShares(traces);
  progress("query cosines", 0, 1);
  out.cosines = MeasureQueryCosines(traces);
  if (options.offline) {
    out.packing.status = out.packing.losses_status = out.break_even.status = kOffline;
    return out;
  }
  const ReplayOptions replay{.socket = options.socket, .timeout = options.timeout};
  KVS_ASSIGN_OR_RETURN(out.packing, MeasurePackingLosses(traces, replay, progress));
  KVS_ASSIGN_OR_RETURN(out.break_even, MeasureBreakEven(traces, replay, progress));
  return out;
}

}  // namespace kvstrata::cli
