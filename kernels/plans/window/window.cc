// SPDX-License-Identifier: Apache-2.0
// Selector `window`: the first `sinks` and the last `recent` tokens (StreamingLLM;
// docs/spec/beyond.md, "Baselines"), on CPUs and GPUs.
#include "kernels/plan/plan_rows.h"
#include "kernels/select/selector_rows.h"

namespace kvstrata {
namespace {

FixedChoice Choose(const Plan& plan, int32_t n) {
  const WindowOptions& own = plan.window;
  if (AttendsInFull(n, own.sinks + own.recent, 0, plan.min_tokens)) return {};
  return {own.sinks, {}, n - own.recent};
}

SelectionRule Rule(const Plan& plan, int32_t) {
  SelectionRule rule;
  rule.always = plan.window.sinks + plan.window.recent;
  rule.rows = rule.always;
  return rule;
}

using WindowOption = RowsOf<&Plan::window>;
constexpr PlanOption kRows[] = {
    WindowOption::Int<&WindowOptions::sinks, 0, kMaxTokens>("n_sink").Or("sinks"),
    WindowOption::Int<&WindowOptions::recent, 1, kMaxTokens>("n_recent").Or("recent"),
};

}  // namespace

constinit const Preset kWindowPreset = {
    .description = "StreamingLLM: the first 4 and the last 2044 tokens",
    .options = {kRows},
    .codecs = kWithoutSummaries};
extern constinit const FixedSelection kWindowSelection = {Choose, Rule};
constinit const SelectorRow kWindowSelector = FixedRow<kWindowSelection>();

}  // namespace kvstrata
