// Selector `minmax`: per layer and KV head, the pages whose key box allows the largest logit
// (Quest; docs/spec/beyond.md, "Baselines"). Always-on sets are rounded outwards to whole pages;
// floor(budget / page) pages are taken from the rest. Every candidate page is complete, so stored
// rows suffice.
#include <algorithm>

#include "kernels/segment/index_rows.h"
#include "kernels/select/no_inspection.h"
#include "kernels/select/selection_rule.h"
#include "kernels/select/selector.h"
#include "kernels/select/unit_scores.h"

namespace kvstrata {
namespace {

class MinMaxSelector final : public Selector {
 public:
  explicit MinMaxSelector(const Plan& plan)
      : page_(plan.index.unit),
        budget_(plan.minmax.budget),
        sink_(plan.minmax.sinks),
        recent_(plan.minmax.recent),
        min_tokens_(plan.min_tokens),
        softmax_(plan.minmax.group_softmax),
        rest_(plan.index.rest != RestKind::kDrop) {}

  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const int32_t first = (sink_ + page_ - 1) / page_;
    const int32_t last = std::max(first, std::max(n - recent_, 0) / page_);
    const int32_t always = std::min(first * page_, n) + std::max(n - last * page_, 0);
    if (AttendsInFull(n, always, budget_, min_tokens_)) return out->SetFull(n);

    scores_.Score(context, layer, q, ScoreWork::Kind::kMinMax, {first, last}, softmax_);
    out->Reset(n, context.geometry->kv_heads);
    out->scored_bytes = int64_t{2} * (last - first) * out->groups() * context.geometry->head_dim *
                        SizeOf(context.index->dtype);
    if (rest_) out->coarse.resize(out->groups());
    const Job job{this, &context, out, first, last, n};
    context.executor->ParallelFor(out->groups(), [&job](int64_t head) {
      job.self->Pick(*job.context, static_cast<int>(head), {job.first, job.last}, job.n, job.out);
    });
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<MinMaxSelector>(*this);
    copy->scores_ = {};
    return copy;
  }
  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    return NothingToInspect("minmax", name);
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
    const int32_t k = std::min(budget_ / page_, count);
    std::vector<int32_t>& units = out->units[head];
    units.resize(k);
    context.backend->top_k({scores_.Of(head), count, k, units.data()});
    std::vector<Run>& runs = out->runs[head];
    AppendRun({0, pages.begin * page_}, &runs);
    for (int32_t& unit : units) {
      unit += pages.begin;
      AppendRun({unit * page_, (unit + 1) * page_}, &runs);
    }
    AppendRun({pages.end * page_, n}, &runs);
    if (rest_) AppendRest(pages, units, 0, &out->coarse[head]);
  }

  int32_t page_, budget_, sink_, recent_, min_tokens_;
  bool softmax_, rest_;
  UnitScores scores_;  // of the call under way
};

using Rows = RowsOf<&Plan::minmax>;
constexpr PlanOption kRows[] = {
    Rows::Int<&MinMaxOptions::sinks, 0, kMaxTokens>("n_sink").Or("sinks"),
    Rows::Int<&MinMaxOptions::recent, 1, kMaxTokens>("n_recent").Or("recent"),
    kUnitRow,
    Rows::Int<&MinMaxOptions::budget, 0, kMaxTokens>("budget"),
    Rows::Name<&MinMaxOptions::group_softmax, kGroupNames>("group"),
    kRestRow,
};

}  // namespace

constinit const OptionTable kMinMaxTable = {kRows};

// Choosing reads two keys a unit. Balancing the heads takes two passes over their scores.
SelectionRule MinMaxRule(const Plan& plan, int32_t tokens) {
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

std::unique_ptr<Selector> NewMinMaxSelector(const Plan& plan, const Geometry&) {
  return std::make_unique<MinMaxSelector>(plan);
}

}  // namespace kvstrata
