// SPDX-License-Identifier: Apache-2.0
// Selector `minmax`: per layer and KV head, the pages whose key box allows the largest logit
// (Quest; docs/spec/beyond.md, "Baselines"), or whose logits are the largest by mean and deviation
// (10 there). Always-on sets are rounded outwards to whole pages;
// floor(budget / page) pages are taken from the rest. Every candidate page is complete, so stored
// rows suffice.
#include <algorithm>

#include "kernels/segment/index_rows.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/unit_scores.h"

namespace kvstrata {
namespace {

class MinMaxSelector final : public Selector {
 public:
  explicit MinMaxSelector(const Plan& plan)
      : rule_(MinMaxCandidates(plan)),
        kind_(plan.minmax.deviation ? ScoreWork::Kind::kDeviation : ScoreWork::Kind::kMinMax),
        softmax_(plan.minmax.group_softmax),
        rest_(plan.index.rest != RestKind::kDrop) {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const cuda::Candidates pages = cuda::CandidatesOf(rule_, n);
    if (pages.full) return out->SetFull(n);

    scores_.Score(context, layer, q, kind_, {pages.first, pages.last}, softmax_);
    out->Reset(n, context.geometry->kv_heads);
    out->scored_bytes = int64_t{2} * pages.count() * out->groups() * context.geometry->head_dim *
                        SizeOf(context.index->dtype);
    if (rest_) out->coarse.resize(out->groups());
    const Job job{this, &context, out, pages.first, pages.last, n};
    context.executor->ParallelFor(out->groups(), [&job](int64_t head) {
      job.self->Pick(*job.context, static_cast<int>(head), {job.first, job.last}, job.n, job.out);
    });
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<MinMaxSelector>(*this);
    copy->scores_ = {};
    return copy;
  }

 private:
  struct Job {
    MinMaxSelector* self;
    const SelectContext* context;
    Selection* out;
    int32_t first, last, n;
  };

  void Pick(const SelectContext& context, int head, Run pages, int32_t n, Selection* out) const {
    const int32_t count = pages.end - pages.begin;
    const int32_t k = std::min(rule_.take, count), page = rule_.unit_tokens;
    std::vector<int32_t>& units = out->units[head];
    units.resize(k);
    context.backend->top_k({scores_.Of(head), count, k, units.data()});
    std::vector<Run>& runs = out->runs[head];
    AppendRun({0, pages.begin * page}, &runs);
    for (int32_t& unit : units) {
      unit += pages.begin;
      AppendRun({unit * page, (unit + 1) * page}, &runs);
    }
    AppendRun({pages.end * page, n}, &runs);
    if (rest_) AppendRest(pages, units, 0, &out->coarse[head]);
  }

  cuda::CandidateRule rule_;
  ScoreWork::Kind kind_;
  bool softmax_, rest_;
  UnitScores scores_;  // the call's that is under way
};

constexpr std::string_view kScoreNames[] = {"bounds", "deviation"};

using MinMaxOption = RowsOf<&Plan::minmax>;
constexpr PlanOption kRows[] = {
    MinMaxOption::Int<&MinMaxOptions::sinks, 0, kMaxTokens>("n_sink").Or("sinks"),
    MinMaxOption::Int<&MinMaxOptions::recent, 1, kMaxTokens>("n_recent").Or("recent"),
    kUnitRow,
    MinMaxOption::Int<&MinMaxOptions::budget, 0, kMaxTokens>("budget"),
    MinMaxOption::Name<&MinMaxOptions::group_softmax, kGroupNames>("group"),
    MinMaxOption::Name<&MinMaxOptions::deviation, kScoreNames>("score").PrintedIf(
        [](const Plan& p) { return p.minmax.deviation; }),
    kRestRow,
};

// Choosing reads two keys a unit. Balancing the heads takes two passes over their scores.
SelectionRule Rule(const Plan& plan, int32_t tokens) {
  SelectionRule rule;
  rule.always = plan.minmax.sinks + plan.minmax.recent;
  rule.unit_tokens = plan.index.unit;
  rule.units = plan.minmax.budget / rule.unit_tokens;
  rule.rows = rule.always + plan.minmax.budget;
  rule.scored = static_cast<double>(tokens) / rule.unit_tokens;
  rule.gpu_us = plan.minmax.group_softmax ? 16 : 9;
  rule.cpu_rows = 570;
  return rule;
}

constexpr auto kCodecs = OverRawAndPacked(
    SegmenterKind::kPage,
    "it ranks pages by the element-wise minimum and maximum of their keys, which only segmenter "
    "'page' keeps");

}  // namespace

cuda::CandidateRule MinMaxCandidates(const Plan& plan) {
  const int32_t unit = plan.index.unit;
  return {unit, plan.minmax.sinks, plan.minmax.recent, plan.minmax.budget / unit, plan.min_tokens};
}

constinit const Preset kMinMaxPreset = {
    .description =
        "Quest: per layer and KV head, the pages with the largest possible logit, 2048 tokens",
    .options = {kRows},
    .codecs = kCodecs};
constinit const SelectorRow kMinMaxSelector = {MakeSelector<MinMaxSelector>, NeedsPromptsEnd, Rule,
                                               CandidatesInFull<MinMaxCandidates>};

}  // namespace kvstrata
