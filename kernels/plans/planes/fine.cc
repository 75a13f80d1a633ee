// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/planes/fine.h"

#include "kernels/plan/plan_rows.h"
#include "kernels/select/no_inspection.h"
#include "kernels/select/selector_rows.h"

namespace kvstrata {
namespace {

bool ByShare(const Plan& plan) { return plan.planes.share > 0; }
bool ByThreshold(const Plan& plan) { return !ByShare(plan); }

}  // namespace

PlanesRule PlanesRuleOf(const Plan& plan) {
  const PlanesOptions& o = plan.planes;
  return {o.share, ByShare(plan) ? 0 : o.fine_above, o.skip_below, o.run, o.sample, o.sinks,
          o.recent};
}

void SelectFine(const Plan& plan, int32_t n, Selection* out) {
  if (AttendsInFull(plan, n)) return out->SetFull(n);
  out->Reset(n, 1);
  out->runs[0] = {{0, n}};
  out->fine = PlanesRuleOf(plan);
}

namespace {

class FineSelector final : public Selector {
 public:
  explicit FineSelector(const Plan& plan) : plan_(plan) {}

  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    SelectFine(plan_, context.view.tokens + 1, out);
  }

  std::unique_ptr<Selector> Clone() const override { return std::make_unique<FineSelector>(*this); }
  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    return NothingToInspect("fine", name);
  }

 private:
  const Plan plan_;
};

constexpr NumberRange kPart = {0, 1};
constexpr NumberRange kTimesN = {0, 1e6};

// What is taken whatever the normaliser is needs no sample of it: strips alone go by it.
SetResult SetPart(const OptionValue& value, Plan* plan) {
  const SetResult set = SetNumber(value, kPart, &plan->planes.share);
  if (ByShare(*plan)) plan->planes.sample = 1;
  return set;
}

using Rows = RowsOf<&Plan::planes>;
constexpr PlanOption kRows[] = {
    {.name = "share",
     .set = SetPart,
     .text = [](const Plan& p) { return NumberText(p.planes.share); },
     .allowed = [] { return NumberAllowed(kPart); },
     .printed = ByShare},
    Rows::Number<&PlanesOptions::fine_above, kFactor>("fine_above").When(ByThreshold, "share = 0"),
    Rows::Number<&PlanesOptions::skip_below, kTimesN>("skip_below"),
    Rows::OneOf<&PlanesOptions::run, 1, 4, 8, 16>("run").When(ByShare, "share above 0"),
    Rows::Int<&PlanesOptions::sample, 1, 1024>("sample"),
    Rows::Int<&PlanesOptions::sinks, 0, kMaxTokens>("sinks"),
    Rows::Int<&PlanesOptions::recent, 1, kMaxTokens>("recent"),
};

}  // namespace

extern constinit const OptionTable kFineTable = {kRows};

std::unique_ptr<Selector> NewFineSelector(const Plan& plan, const Geometry&) {
  return std::make_unique<FineSelector>(plan);
}

// Everything is attended; what that reads is the codec's.
SelectionRule FineRule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.rows = tokens;
  return rule;
}

bool FineInFull(const Plan& plan, int32_t n) {
  return n <= int64_t{plan.planes.sinks} + plan.planes.recent;
}

}  // namespace kvstrata
