// SPDX-License-Identifier: Apache-2.0
#include "client/cli/break_even.h"

#include <algorithm>

#include "client/cli/packing_losses.h"

namespace kvstrata::cli {
namespace {

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

}  // namespace

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

}  // namespace kvstrata::cli
