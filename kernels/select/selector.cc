// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/selector.h"

#include "kernels/plan/plan_needs.h"
#include "kernels/select/selection_rule.h"
#include "kernels/select/selector_rows.h"

namespace kvstrata {

namespace {

const SelectorRow& RowOf(const Plan& plan) {
  for (const PairRow& pair : kPairRows) {
    const bool is_it = pair.selector == plan.selector && pair.codec == plan.codec;
    if (is_it && pair.row != nullptr) return *pair.row;
  }
  return *SelectorRows()[static_cast<size_t>(plan.selector)];
}

}  // namespace

std::unique_ptr<Selector> NewSelector(const Plan& plan, const Geometry& geometry) {
  return RowOf(plan).make(plan, geometry);
}

uint32_t SelectorNeeds(const Plan& plan) { return RowOf(plan).needs(plan); }

SelectionRule SelectionRuleOf(const Plan& plan, int32_t tokens) {
  return RowOf(plan).rule(plan, tokens);
}

bool AttendsInFull(const Plan& plan, int32_t n) {
  return n < plan.min_tokens || RowOf(plan).in_full(plan, n);
}

}  // namespace kvstrata
