#include "kernels/step/break_even.h"

#include <algorithm>

#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

constexpr int32_t kMostTokens = 1 << 29;  // that min_tokens may be
constexpr int32_t kRounding = 64;

// Bytes that attention on an H100 reads in a microsecond.
constexpr double kGpuBytesAMicrosecond = 3.1e6;
// Bytes of a packed row over those of a raw one: elements, and a bit for each channel.
double PackedShare(const Plan& plan, const Geometry& g) {
  const double dim = g.head_dim;
  const double keep = plan.packed.search || plan.packed.keep == 0 ? dim / 4 : plan.packed.keep;
  return (2 * keep + dim / 8) / (2 * dim);
}

// What a codec's rows cost over raw ones. Packed rows are decoded, spans expanded: most of what a
// layer takes beside reading is that, whatever chooses them.
struct CodecCost {
  double share = 1;                 // bytes of a row
  double gpu_us = 0, cpu_rows = 0;  // as SelectionRule's, in its place
};

CodecCost CostOf(const Plan& plan, const Geometry& g, const SelectionRule& rule) {
  if (plan.codec == CodecKind::kPacked) return {PackedShare(plan, g), 34, 3420};
  if (plan.codec == CodecKind::kLowRank) return {1, 28, 3420};
  return {1, rule.gpu_us, rule.cpu_rows};
}

bool Selects(const Plan& plan) {
  return plan.selector != SelectorKind::kFull || plan.codec != CodecKind::kRaw;
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
