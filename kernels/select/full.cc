// Selector `full`: everything, always.
#include "kernels/select/no_inspection.h"
#include "kernels/select/selection_rule.h"
#include "kernels/select/selector.h"

namespace kvstrata {
namespace {

class FullSelector final : public Selector {
 public:
  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}
  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    out->SetFull(context.view.tokens + 1);
  }
  std::unique_ptr<Selector> Clone() const override { return std::make_unique<FullSelector>(); }
  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    return NothingToInspect("full", name);
  }
};

}  // namespace

SelectionRule FullRule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.rows = tokens;
  return rule;
}

std::unique_ptr<Selector> NewFullSelector(const Plan&, const Geometry&) {
  return std::make_unique<FullSelector>();
}

}  // namespace kvstrata
