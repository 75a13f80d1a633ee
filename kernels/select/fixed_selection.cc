// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/fixed_selection.h"

namespace kvstrata {
namespace {

class FixedSelector final : public Selector {
 public:
  FixedSelector(const FixedSelection& fixed, const Plan& plan) : fixed_(fixed), plan_(plan) {}

  void Select(const SelectContext& context, int, const float*, Selection* out) override {
    SelectFixed(fixed_, plan_, context.view.tokens + 1, out);
  }
  std::unique_ptr<Selector> Clone() const override {
    return std::make_unique<FixedSelector>(*this);
  }

 private:
  const FixedSelection& fixed_;
  const Plan plan_;
};

}  // namespace

void SelectFixed(const FixedSelection& fixed, const Plan& plan, int32_t n, Selection* out) {
  const FixedChoice choice = fixed.choose(plan, n);
  if (choice.everything()) return out->SetFull(n);
  out->Reset(n, 1);
  std::vector<Run>& runs = out->runs[0];
  AppendRun({0, choice.sink_end}, &runs);
  for (const int32_t unit : choice.units) {
    out->units[0].push_back(unit);
    AppendRun({unit * fixed.unit_tokens, (unit + 1) * fixed.unit_tokens}, &runs);
  }
  AppendRun({choice.recent_begin, n}, &runs);
}

std::unique_ptr<Selector> NewFixedSelector(const FixedSelection& fixed, const Plan& plan) {
  return std::make_unique<FixedSelector>(fixed, plan);
}

}  // namespace kvstrata
