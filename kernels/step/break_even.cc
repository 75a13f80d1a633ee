#include "kernels/step/break_even.h"

#include <algorithm>
#include <cmath>

namespace kvstrata {
namespace {

constexpr int32_t kMostTokens = 1 << 29;  // that min_tokens may be
constexpr int32_t kRounding = 64;

// Bytes that attention on an H100 reads in a microsecond.
constexpr double kGpuBytesAMicrosecond = 3.1e6;
// Of ten decode steps of selector vote one misses its cache, and reads all keys.
constexpr double kVoteMisses = 0.1;

// What a layer's selection takes beside the bytes that it reads.
struct SelectionCost {
  double gpu_us;    // for the batch
  double cpu_rows;  // for each sequence: raw rows (a key and a value of all KV heads) in that time
};

SelectionCost CostOf(const Plan& plan) {
  // Packed rows are decoded, spans expanded: most of it is that.
  if (plan.codec == CodecKind::kPacked) return {34, 3420};
  if (plan.codec == CodecKind::kLowRank) return {28, 3420};
  switch (plan.selector) {
    case SelectorKind::kMinMax:
      return plan.minmax.group_softmax ? SelectionCost{16, 570} : SelectionCost{9, 570};
    case SelectorKind::kVote:
      return {10, 2850};
    case SelectorKind::kBucket:
      return {10, 1750};
    case SelectorKind::kBlock:
      return {9, 570};
    case SelectorKind::kFull:
    case SelectorKind::kWindow:
    case SelectorKind::kCascade:  // once in hundreds of steps
    case SelectorKind::kZoom:     // of codec lowrank
      break;
  }
  return {0, 0};
}

// Bytes of a packed row over those of a raw one: elements, and a bit for each channel.
double PackedShare(const Plan& plan, const Geometry& g) {
  const double dim = g.head_dim;
  const double keep = plan.packed.search || plan.packed.keep == 0 ? dim / 4 : plan.packed.keep;
  return (2 * keep + dim / 8) / (2 * dim);
}

// Rows of `tokens` that a step attends, as raw ones.
double AttendedRows(const Plan& plan, const Geometry& g, double tokens) {
  const double of_units = plan.index.rest == RestKind::kDrop ? 0 : tokens / plan.index.unit;
  const double share = plan.codec == CodecKind::kPacked ? PackedShare(plan, g) : 1;
  switch (plan.selector) {
    case SelectorKind::kFull:
      return share * tokens;
    case SelectorKind::kWindow:
      return share * (plan.window.sinks + plan.window.recent);
    case SelectorKind::kMinMax:
      return share * (plan.minmax.sinks + plan.minmax.recent + plan.minmax.budget) + of_units;
    case SelectorKind::kCascade: {
      const double pages = plan.cascade.sinks + plan.cascade.recent + plan.cascade.every / 2.0;
      const double chosen = plan.cascade.rho[0] * plan.cascade.rho[1] * plan.cascade.rho[2];
      return share * (pages * plan.index.unit + chosen * tokens) + of_units;
    }
    case SelectorKind::kVote:
      return share * (plan.vote.sinks + plan.vote.recent + plan.vote.budget);
    case SelectorKind::kBucket:
      return plan.bucket.sinks + plan.bucket.recent + plan.bucket.budget;
    case SelectorKind::kZoom:
      return plan.zoom.rows > 0    ? plan.zoom.rows
             : plan.zoom.rows == 0 ? tokens
                                   : plan.zoom.rows_share * tokens;
    case SelectorKind::kBlock:
      return share * plan.block.share * tokens + (plan.codec == CodecKind::kPacked ? 0 : of_units);
  }
  return tokens;
}

// The same of what it reads to choose them.
double ScoredRows(const Plan& plan, const Geometry& g, double tokens) {
  switch (plan.selector) {
    case SelectorKind::kMinMax:  // two keys a page
      return tokens / plan.index.unit;
    case SelectorKind::kVote:
      return kVoteMisses * tokens / 2;
    case SelectorKind::kBlock:
      return plan.codec == CodecKind::kPacked
                 ? PackedShare(plan, g) * tokens / plan.packed.block / 2
                 : tokens / plan.index.unit / 2;
    case SelectorKind::kFull:
    case SelectorKind::kWindow:
    case SelectorKind::kCascade:
    case SelectorKind::kBucket:
    case SelectorKind::kZoom:
      return 0;
  }
  return 0;
}

bool Selects(const Plan& plan) {
  return plan.selector != SelectorKind::kFull || plan.codec != CodecKind::kRaw;
}

}  // namespace

double SavedBytes(const Plan& plan, const Geometry& g, StepsOn where, int32_t tokens) {
  if (!Selects(plan)) return 0;
  const double row = 2.0 * static_cast<double>(g.row_bytes()) * g.kv_heads;
  const SelectionCost cost = CostOf(plan);
  const double spared = tokens - AttendedRows(plan, g, tokens) - ScoredRows(plan, g, tokens);
  if (where == StepsOn::kCpu) return plan.batch * row * (spared - cost.cpu_rows);
  return plan.batch * row * spared - cost.gpu_us * kGpuBytesAMicrosecond;
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
