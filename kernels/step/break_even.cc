// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/break_even.h"

#include "kernels/codec/codec.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

constexpr int32_t kMostTokens = 1 << 29;  // that min_tokens may be
constexpr int32_t kRounding = 64;

// Bytes that attention on an H100 reads in a microsecond.
constexpr double kGpuBytesAMicrosecond = 3.1e6;

// What rows as the codec holds them cost over raw ones.
CodecCost CostOf(const Plan& plan, const Geometry& g, const SelectionRule& rule) {
  const Codec& codec = CodecOf(plan);
  return codec.stores() ? codec.cost(plan, g) : CodecCost{1, rule.gpu_us, rule.cpu_rows};
}

bool Selects(const Plan& plan) {
  return plan.selector != SelectorKind::kFull || CodecOf(plan).stores();
}

}  // namespace

double SavedBytes(const Plan& plan, const Geometry& g, StepsOn where, int32_t tokens) {
  if (!Selects(plan)) return 0;
  const double row = 2.0 * static_cast<double>(g.row_bytes()) * g.kv_heads;
  const SelectionRule rule = SelectionRuleOf(plan, tokens);
  const CodecCost codec = CostOf(plan, g, rule);
  const double means =
      plan.index.rest == RestKind::kDrop ? 0 : static_cast<double>(tokens) / plan.index.unit;
  const double read = codec.share * (rule.rows + rule.scored_stored) + rule.scored + means;
  const double spared = tokens - read;
  if (where == StepsOn::kCpu) return plan.batch * row * (spared - codec.cpu_rows);
  return plan.batch * row * spared - codec.gpu_us * kGpuBytesAMicrosecond;
}

// What is saved grows with the tokens, or never gets above nothing.
int32_t BreakEvenTokens(const Plan& plan, const Geometry& geometry, StepsOn where) {
  if (!Selects(plan)) return 0;
  int32_t low = 0, high = kMostTokens / kRounding;  // in units of kRounding
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (SavedBytes(plan, geometry, where, middle * kRounding) > 0) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low * kRounding;
}

Plan WithMinTokens(Plan plan, const Geometry& geometry, StepsOn where) {
  if (plan.min_tokens == kAutoTokens) {
    plan.min_tokens = BreakEvenTokens(plan, geometry, where);
    plan.batch = 1;
  }
  return plan;
}

}  // namespace kvstrata
