// Selector `window`: the first `sinks` and the last `recent` tokens (StreamingLLM;
// docs/spec/beyond.md, "Baselines").
#include "kernels/plan_rows.h"
#include "kernels/select/no_inspection.h"
#include "kernels/select/selection_rule.h"
#include "kernels/select/selector.h"

namespace kvstrata {
namespace {

class WindowSelector final : public Selector {
 public:
  explicit WindowSelector(const Plan& plan)
      : sink_(plan.window.sinks), recent_(plan.window.recent), min_tokens_(plan.min_tokens) {}

  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}

  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    if (AttendsInFull(n, sink_ + recent_, 0, min_tokens_)) return out->SetFull(n);
    out->Reset(n, 1);
    AppendRun({0, sink_}, &out->runs[0]);
    AppendRun({n - recent_, n}, &out->runs[0]);
  }

  std::unique_ptr<Selector> Clone() const override {
    return std::make_unique<WindowSelector>(*this);
  }
  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    return NothingToInspect("window", name);
  }

 private:
  int32_t sink_, recent_, min_tokens_;
};

using Rows = RowsOf<&Plan::window>;
constexpr PlanOption kRows[] = {
    Rows::Int<&WindowOptions::sinks, 0, kMaxTokens>("n_sink").Or("sinks"),
    Rows::Int<&WindowOptions::recent, 1, kMaxTokens>("n_recent").Or("recent"),
};

}  // namespace

constinit const OptionTable kWindowTable = {kRows};

SelectionRule WindowRule(const Plan& plan, int32_t) {
  SelectionRule rule;
  rule.always = plan.window.sinks + plan.window.recent;
  rule.rows = rule.always;
  return rule;
}

std::unique_ptr<Selector> NewWindowSelector(const Plan& plan, const Geometry&) {
  return std::make_unique<WindowSelector>(plan);
}

}  // namespace kvstrata
