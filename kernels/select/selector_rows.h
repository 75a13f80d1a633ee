// SPDX-License-Identifier: Apache-2.0
// The table of selectors: one row each, with all that is asked of a selector by its kind. What a
// GPU has of them is in kernels/step/gpu/frame/cuda_selector_rows.h.
#ifndef KVSTRATA_KERNELS_SELECT_SELECTOR_ROWS_H_
#define KVSTRATA_KERNELS_SELECT_SELECTOR_ROWS_H_

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/plan/built_plans.h"
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

// Each in the selector's own file.
extern const FixedSelection kFullSelection, kWindowSelection;
std::unique_ptr<Selector> NewMinMaxSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewCascadeSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewVoteSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewBucketSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewZoomSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewSpanBucketSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewRawBlockSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewPackedBlockSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewBitsSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewFineSelector(const Plan& plan, const Geometry& geometry);
uint32_t CascadeNeeds(const Plan& plan);
SelectionRule MinMaxRule(const Plan& plan, int32_t tokens);
SelectionRule CascadeRule(const Plan& plan, int32_t tokens);
SelectionRule VoteRule(const Plan& plan, int32_t tokens);
SelectionRule BucketRule(const Plan& plan, int32_t tokens);
SelectionRule ZoomRule(const Plan& plan, int32_t tokens);
SelectionRule BlockRule(const Plan& plan, int32_t tokens);
SelectionRule BitsRule(const Plan& plan, int32_t tokens);
SelectionRule FineRule(const Plan& plan, int32_t tokens);
bool BucketInFull(const Plan& plan, int32_t n);
bool ZoomInFull(const Plan& plan, int32_t n);
bool RawBlocksInFull(const Plan& plan, int32_t n);
bool FineInFull(const Plan& plan, int32_t n);

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
  return {MakeFixedSelector<kFixed>, needs, FixedRule<kFixed>, FixedInFull<kFixed>};
}

inline constexpr SelectorRow kSelectorRows[] = {
    FixedRow<kFullSelection>(NeedsNothing),
    FixedRow<kWindowSelection>(),
    {NewMinMaxSelector, NeedsPromptsEnd, MinMaxRule, CandidatesInFull<MinMaxCandidates>},
    {NewCascadeSelector, CascadeNeeds, CascadeRule, NeverByBudget},
    {NewVoteSelector, NeedsPromptsEnd, VoteRule, CandidatesInFull<VoteCandidates>},
    {NewBucketSelector, NeedsSentencesAndQueries, BucketRule, BucketInFull},
    KVS_OF_SEKV({NewZoomSelector, NeedsPromptsEnd, ZoomRule, ZoomInFull}),
    KVS_OF_MOSAICKV({NewRawBlockSelector, NeedsPromptsEnd, BlockRule, RawBlocksInFull}),
    {NewBitsSelector, NeedsPromptsEnd, BitsRule, CandidatesInFull<BitsCandidates>},
    {NewFineSelector, NeedsPromptsEnd, FineRule, FineInFull},
};  // by SelectorKind

// A selector over a codec that it is written for, instead of its row above.
struct PairRow {
  SelectorKind selector = SelectorKind::kFull;
  CodecKind codec = CodecKind::kRaw;
  SelectorRow row = {};  // empty where the build leaves it out
};
inline constexpr PairRow kPairRows[] = {
    KVS_OF_SEKV({SelectorKind::kBucket,
                 CodecKind::kLowRank,
                 {NewSpanBucketSelector, NeedsSentences, BucketRule, NeverByBudget}}),
    KVS_OF_MOSAICKV({SelectorKind::kBlock,
                     CodecKind::kPacked,
                     {NewPackedBlockSelector, NeedsPromptsEnd, BlockRule, NeverByBudget}}),
};

// The rows that are in use: these. Alone in its file, so that a test can be linked with its own
// (tests/kernels/toy_selector_rows.cc).
std::span<const SelectorRow> SelectorRows();

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_SELECTOR_ROWS_H_
