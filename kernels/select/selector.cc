#include "kernels/select/selector.h"

#include "kernels/plan_needs.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {

std::unique_ptr<Selector> NewFullSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewWindowSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewMinMaxSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewCascadeSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewVoteSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewBucketSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewZoomSelector(const Plan& plan, const Geometry& geometry);
std::unique_ptr<Selector> NewBlockSelector(const Plan& plan, const Geometry& geometry);
uint32_t CascadeNeeds(const Plan& plan);
uint32_t BucketNeeds(const Plan& plan);
SelectionRule FullRule(const Plan& plan, int32_t tokens);
SelectionRule WindowRule(const Plan& plan, int32_t tokens);
SelectionRule MinMaxRule(const Plan& plan, int32_t tokens);
SelectionRule CascadeRule(const Plan& plan, int32_t tokens);
SelectionRule VoteRule(const Plan& plan, int32_t tokens);
SelectionRule BucketRule(const Plan& plan, int32_t tokens);
SelectionRule ZoomRule(const Plan& plan, int32_t tokens);
SelectionRule BlockRule(const Plan& plan, int32_t tokens);

namespace {

uint32_t Nothing(const Plan&) { return 0; }
// A prompt attends everything; selection begins behind it.
uint32_t PromptsEnd(const Plan&) { return kNeedPrefillDone; }

struct SelectorRow {
  std::unique_ptr<Selector> (*make)(const Plan& plan, const Geometry& geometry);
  uint32_t (*needs)(const Plan& plan);
  SelectionRule (*rule)(const Plan& plan, int32_t tokens);
};
constexpr SelectorRow kSelectors[] = {
    {NewFullSelector, Nothing, FullRule},        {NewWindowSelector, PromptsEnd, WindowRule},
    {NewMinMaxSelector, PromptsEnd, MinMaxRule}, {NewCascadeSelector, CascadeNeeds, CascadeRule},
    {NewVoteSelector, PromptsEnd, VoteRule},     {NewBucketSelector, BucketNeeds, BucketRule},
    {NewZoomSelector, PromptsEnd, ZoomRule},     {NewBlockSelector, PromptsEnd, BlockRule},
};  // by SelectorKind

const SelectorRow& RowOf(const Plan& plan) {
  return kSelectors[static_cast<size_t>(plan.selector)];
}

}  // namespace

std::unique_ptr<Selector> NewSelector(const Plan& plan, const Geometry& geometry) {
  return RowOf(plan).make(plan, geometry);
}

uint32_t SelectorNeeds(const Plan& plan) { return RowOf(plan).needs(plan); }

SelectionRule SelectionRuleOf(const Plan& plan, int32_t tokens) {
  return RowOf(plan).rule(plan, tokens);
}

}  // namespace kvstrata
