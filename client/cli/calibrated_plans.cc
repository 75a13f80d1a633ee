// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "client/cli/calibration_document.h"
#include "client/cli/printer.h"

namespace kvstrata::cli {
namespace {

// Writes x with a decimal point or an exponent, as TOML's floats have them.
std::string Float(double x) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.6g", x);
  const std::string out = text.data();
  return out.find_first_of(".en") == std::string::npos ? out + ".0" : out;
}

std::string Percent1(double share) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f %%", share * 100);
  return text.data();
}

// Collects options and their reasons.
class Draft {
 public:
  explicit Draft(std::string preset) : preset_(std::move(preset)) {}

  void Set(const std::string& option, const std::string& value, const std::string& why) {
    options_ += (options_.empty() ? "" : ", ") + option + " = " + value;
    why_.push_back(option + ": " + why);
  }
  void Explain(const std::string& why) { why_.push_back(why); }
  bool empty() const { return options_.empty(); }
  CalibratedPlan Finish() && {
    return {preset_ + "_calibrated", preset_ + "{" + options_ + "}", std::move(why_)};
  }

 private:
  std::string preset_, options_;
  std::vector<std::string> why_;
};

// Rounded up to whole pages of the largest size.
void SetMinTokens(const BreakEven& measured, const std::string& preset, Draft* draft) {
  const auto plan = std::ranges::find(measured.plans, preset, &BreakEvenPlan::name);
  if (plan == measured.plans.end() || plan->points.empty()) return;
  const int32_t longest = plan->points.back().tokens;
  if (!plan->tokens) {
    const bool sparse = std::ranges::any_of(plan->points, &BreakEvenPoint::sparse);
    draft->Explain("min_tokens is the preset's: " +
                   std::string(sparse ? "on this machine a step was not faster than full's at "
                                      : "the plan attends in full at ") +
                   std::to_string(longest) + " tokens");
    return;
  }
  const auto length = static_cast<int64_t>(std::ceil(*plan->tokens / 64)) * 64;
  draft->Set("min_tokens", std::to_string(length),
             "break-even with full, from median step times on this machine at " +
                 std::to_string(plan->points.size()) + " lengths up to " + std::to_string(longest));
}

Draft Chess(const Calibration& c) {
  Draft draft("chess");
  if (c.entropy.status == "ok") {
    draft.Set("thresholds",
              "[" + Float(c.entropy.thresholds[0]) + ", " + Float(c.entropy.thresholds[1]) + "]",
              "99th percentiles of mean and variance of entropy (nats) over " +
                  std::to_string(c.entropy.means.size()) + " pages of 32 generated tokens; " +
                  Percent1(c.entropy.share_over) + " of them exceed both");
  }
  SetMinTokens(c.break_even, "chess", &draft);
  return draft;
}

// Half of the budget is for expanded spans: the smallest alpha whose persistent rows leave it, at
// the preset's quarter of the tokens; else the alpha that keeps least, at twice what it keeps.
Draft SekvOf(const SpanShares& spans) {
  constexpr double kPresetShare = 0.25;
  Draft draft("sekv");
  if (spans.status != "ok") return draft;
  const auto fits = [](const AlphaShare& a) { return a.budget_share <= kPresetShare / 2; };
  auto chosen = std::ranges::find_if(spans.alphas, fits);
  const bool preset = chosen != spans.alphas.end();
  if (!preset) chosen = std::ranges::min_element(spans.alphas, {}, &AlphaShare::budget_share);
  draft.Set("alpha", Float(chosen->alpha),
            std::string(preset ? "the smallest" : "none") +
                " of 0.5 .. 3 keeps at most 12.5 % of the rows, window included" +
                (preset ? "" : "; this one keeps least") + ": " + Percent1(chosen->budget_share) +
                " (anchors " + Percent1(chosen->anchor_share) + ", of " +
                std::to_string(spans.tokens) + " prompt tokens)");
  const double share =
      preset ? kPresetShare : std::min(1.0, std::ceil(chosen->budget_share * 200) / 100);
  draft.Set("rows_share", Float(share),
            std::string(preset ? "the preset's" : "twice that") +
                "; the smallest budget that holds is " + std::to_string(chosen->budget_rows) +
                " rows");
  return draft;
}

// The strictest theta at which half of the steps still reuse a selection.
Draft TokenSelectOf(const Calibration& c) {
  Draft draft("tokenselect");
  const auto half = [](const HitRate& h) { return h.flattened >= 0.5; };
  const auto& rates = c.cosines.hit_rates;
  const auto strictest = std::find_if(rates.rbegin(), rates.rend(), half);
  if (strictest != rates.rend()) {
    draft.Set("theta", Float(strictest->theta),
              "the strictest of 0.8 .. 0.95 at which half of the steps reuse a selection: " +
                  Percent1(strictest->flattened) + " of " + std::to_string(c.cosines.steps) +
                  " steps x " + std::to_string(c.cosines.layers.size()) + " layers");
  } else if (!rates.empty()) {
    draft.Explain(
        "theta is the preset's: at none of 0.8 .. 0.95 do half of the steps reuse a selection");
  }
  SetMinTokens(c.break_even, "tokenselect", &draft);
  return draft;
}

Draft MosaicOf(const PackingLosses& packing) {
  Draft draft("mosaickv");
  if (packing.losses.size() >= 2 && packing.losses[1].loss.size() > 0) {
    const ChannelLoss& quarter = packing.losses[1];
    const double p90 = quarter.loss.Percentile(90);
    draft.Set("strategy", "\"search\"", "per segment, layer and KV head");
    draft.Set("max_channel_loss", Float(std::min(1.0, std::ceil(p90 * 1000 + 1) / 1000)),
              "above the 90th percentile, " + Float(p90) + ", of the loss with " +
                  std::to_string(quarter.keep) + " channels kept, over " +
                  std::to_string(quarter.loss.size()) + " segments and heads");
  } else if (!packing.strategies.empty()) {
    const StrategyCount& most = packing.strategies[0];
    int64_t all = 0;
    for (const StrategyCount& s : packing.strategies) all += s.count;
    draft.Set("keep", std::to_string(most.strategy[0]),
              "the search's most frequent strategy, " + std::to_string(most.count) + " of " +
                  std::to_string(all) + " segments and heads");
    draft.Set("neighbours", std::to_string(most.strategy[1]), "the same");
    draft.Set("block", std::to_string(most.strategy[2]), "the same");
  }
  return draft;
}

Draft Quest(const Calibration& c) {
  Draft draft("quest");
  SetMinTokens(c.break_even, "quest", &draft);
  return draft;
}

}  // namespace

std::vector<CalibratedPlan> PlansOf(const Calibration& calibration) {
  std::vector<CalibratedPlan> out;
  Draft drafts[] = {Quest(calibration), Chess(calibration), TokenSelectOf(calibration),
                    SekvOf(calibration.spans), MosaicOf(calibration.packing)};
  for (Draft& draft : drafts) {
    if (!draft.empty()) out.push_back(std::move(draft).Finish());
  }
  return out;
}

std::string ToToml(const std::vector<CalibratedPlan>& plans,
                   const std::vector<std::string>& origin) {
  std::string out;
  // A path may hold anything; a comment ends at the first line break.
  for (const std::string& line : origin) out += "# " + Printable(line) + "\n";
  out += "\n[plans]\n";
  for (const CalibratedPlan& plan : plans) {
    for (const std::string& line : plan.why) out += "# " + Printable(line) + "\n";
    out += plan.name + " = '" + plan.text + "'\n";
  }
  return out;
}

}  // namespace kvstrata::cli
