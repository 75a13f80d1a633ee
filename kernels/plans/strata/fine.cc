// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/fine.h"

#include "kernels/plan/plan_rows.h"
#include "kernels/select/selector_rows.h"

namespace kvstrata {
namespace {

bool ByShare(const Plan& plan) { return plan.fine.share > 0; }
bool ByThreshold(const Plan& plan) { return !ByShare(plan); }

class FineSelector final : public Selector {
 public:
  explicit FineSelector(const Plan& plan) : plan_(plan) {}

  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    SelectFine(plan_, context.view.tokens + 1, out);
  }

  std::unique_ptr<Selector> Clone() const override { return std::make_unique<FineSelector>(*this); }

 private:
  const Plan plan_;
};

constexpr NumberRange kPart = {0, 1};
constexpr NumberRange kTimesN = {0, 1e6};

// What is taken whatever the normaliser is needs no sample of it: strips alone go by it.
SetResult SetPart(const OptionValue& value, Plan* plan) {
  const SetResult set = SetNumber(value, kPart, &plan->fine.share);
  if (ByShare(*plan)) plan->fine.sample = 1;
  return set;
}

using Rows = RowsOf<&Plan::fine>;
constexpr PlanOption kRows[] = {
    {.name = "share",
     .set = SetPart,
     .text = [](const Plan& p) { return NumberText(p.fine.share); },
     .allowed = [] { return NumberAllowed(kPart); },
     .printed = ByShare},
    Rows::Number<&FineOptions::fine_above, kFactor>("fine_above").When(ByThreshold, "share = 0"),
    Rows::Number<&FineOptions::skip_below, kTimesN>("skip_below"),
    Rows::OneOf<&FineOptions::run, 1, 4, 8, 16>("run").When(ByShare, "share above 0"),
    Rows::Int<&FineOptions::sample, 1, 1024>("sample"),
    Rows::Int<&FineOptions::sinks, 0, kMaxTokens>("sinks"),
    Rows::Int<&FineOptions::recent, 1, kMaxTokens>("recent"),
};

// Everything is attended; what that reads is the codec's.
SelectionRule Rule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.rows = tokens;
  return rule;
}

bool InFull(const Plan& plan, int32_t n) {
  return n <= int64_t{plan.fine.sinks} + plan.fine.recent;
}

constexpr Combination kCodecs[] = {{CodecKind::kPlanes, SegmenterKind::kNone, kNoSummaries}};

}  // namespace

PlanesRule PlanesRuleOf(const Plan& plan) {
  const FineOptions& o = plan.fine;
  return {o.share, ByShare(plan) ? 0 : o.fine_above, o.skip_below, o.run, o.sample, o.sinks,
          o.recent};
}

void SelectFine(const Plan& plan, int32_t n, Selection* out) {
  if (AttendsInFull(plan, n)) return out->SetFull(n);
  out->Reset(n, 1);
  out->runs[0] = {{0, n}};
  out->fine = PlanesRuleOf(plan);
}

constinit const Preset kFinePreset = {
    .description =
        "kvstrata's own: keys and values in nested bits, everything attended by two, "
        "what matters by eight",
    .options = {kRows},
    .codecs = kCodecs,
    .why_no_other =
        "which rows are read by all of their planes is found among rows that are "
        "attended by one, and only selector 'fine' over codec 'planes' does so"};
constinit const SelectorRow kFineSelector = {MakeSelector<FineSelector>, NeedsPromptsEnd, Rule,
                                             InFull};

}  // namespace kvstrata
