// SPDX-License-Identifier: Apache-2.0
// What is asked of a selector by its kind: a row each, in the selector's own file, and the table of
// them, which is made from kernels/plans/plan_list.h. What a GPU has of them is in
// kernels/step/gpu/frame/cuda_selector_rows.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "kernels/plan/plan_needs.h"
#include "kernels/select/fixed_selection.h"
#include "kernels/select/selection_rule.h"
#include "kernels/select/selector.h"

namespace kvstrata {

struct SelectorRow {
  std::unique_ptr<Selector> (*make)(const Plan& plan, const Geometry& geometry);
  // What it asks of the engine: a sum of Needs.
  uint32_t (*needs)(const Plan& plan);
  SelectionRule (*rule)(const Plan& plan, int32_t tokens);
  // Whether a step of n tokens attends all of them, because its budget holds them.
  bool (*in_full)(const Plan& plan, int32_t n);
};

inline uint32_t NeedsNothing(const Plan&) { return 0; }
// A prompt attends everything; selection begins behind it.
inline uint32_t NeedsPromptsEnd(const Plan&) { return kNeedPrefillDone; }
inline uint32_t NeedsSentences(const Plan&) { return kNeedPrefillDone | kNeedBoundary; }
inline uint32_t NeedsSentencesAndQueries(const Plan& plan) {
  return NeedsSentences(plan) | kNeedPromptQueries;
}

// All that compete are taken.
template <cuda::CandidateRule (*kRuleOf)(const Plan&)>
bool CandidatesInFull(const Plan& plan, int32_t n) {
  return cuda::CandidatesOf(kRuleOf(plan), n).full;
}
inline bool NeverByBudget(const Plan&, int32_t) { return false; }

template <const FixedSelection& kFixed>
constexpr SelectorRow FixedRow(uint32_t (*needs)(const Plan& plan) = NeedsPromptsEnd) {
  return {[](const Plan& plan, const Geometry&) { return NewFixedSelector(kFixed, plan); }, needs,
          [](const Plan& plan, int32_t tokens) { return kFixed.rule(plan, tokens); },
          [](const Plan& plan, int32_t n) { return kFixed.choose(plan, n).everything(); }};
}

// By what MakeSelector's T is made of: a plan, and a geometry if it takes one.
template <typename T>
std::unique_ptr<Selector> MakeSelector(const Plan& plan, const Geometry& geometry) {
  if constexpr (std::is_constructible_v<T, const Plan&, const Geometry&>) {
    return std::make_unique<T>(plan, geometry);
  } else {
    return std::make_unique<T>(plan);
  }
}

extern const SelectorRow kFullSelector;  // full.cc
#define KVS_SELECTOR(preset, Kind, name, built) extern const SelectorRow k##Kind##Selector;
#define KVS_SELECTOR_ROW(preset, Kind, name, built) KVS_OF_##built(&k##Kind##Selector),
KVS_PLANS(KVS_SELECTOR)
inline constexpr const SelectorRow* kSelectorRows[] = {&kFullSelector, KVS_PLANS(KVS_SELECTOR_ROW)};

// A selector over a codec that it is written for, instead of its row above.
struct PairRow {
  SelectorKind selector = SelectorKind::kFull;
  CodecKind codec = CodecKind::kRaw;
  const SelectorRow* row = nullptr;  // null where the build leaves it out
};
extern const SelectorRow kSpanBucketSelector, kPackedBlockSelector;
inline constexpr PairRow kPairRows[] = {
    KVS_OF_SEKV({SelectorKind::kBucket, CodecKind::kLowRank, &kSpanBucketSelector}),
    KVS_OF_MOSAICKV({SelectorKind::kBlock, CodecKind::kPacked, &kPackedBlockSelector}),
};

// The rows that are in use, by SelectorKind: these. Alone in its file, so that a test can be linked
// with its own (tests/kernels/toy_selector_rows.cc).
std::span<const SelectorRow* const> SelectorRows();

}  // namespace kvstrata
