// Selector `minmax`: per layer and KV head, the pages whose key box allows the largest logit
// (Quest; spec/common.md, "Baselines"). Always-on sets are rounded outwards to whole pages;
// floor(budget / page) pages are taken from the rest. Every candidate page is complete, so stored
// rows suffice.
#include <algorithm>

#include "kernels/select/no_inspection.h"
#include "kernels/select/selector.h"

namespace kvstrata {
namespace {

class MinMaxSelector final : public Selector {
 public:
  explicit MinMaxSelector(const Plan& plan)
      : page_(plan.page),
        budget_(plan.budget),
        sink_(plan.n_sink),
        recent_(plan.n_recent),
        min_tokens_(plan.min_tokens) {}

  void Begin(const SelectContext&) override {}
  void PrefillDone(const SelectContext&) override {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const int32_t first = (sink_ + page_ - 1) / page_;
    const int32_t last = std::max(first, std::max(n - recent_, 0) / page_);
    const int32_t always = std::min(first * page_, n) + std::max(n - last * page_, 0);
    if (AttendsInFull(n, always, budget_, min_tokens_)) return out->SetFull(n);

    Score(context, layer, q, {first, last});
    out->Reset(n, context.geometry->kv_heads);
    const Job job{this, &context, out, first, last, n};
    context.executor->ParallelFor(out->groups(), [&job](int64_t head) {
      job.self->Pick(*job.context, static_cast<int>(head), {job.first, job.last}, job.n, job.out);
    });
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<MinMaxSelector>(*this);
    copy->scores_ = {};
    copy->works_ = {};
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

  void Score(const SelectContext& context, int layer, const float* q, Run pages) {
    const Geometry& g = *context.geometry;
    const IndexLayout& index = *context.index;
    const size_t count = pages.end - pages.begin;
    scores_.resize(count * g.kv_heads);
    works_.resize(g.kv_heads);
    for (int head = 0; head < g.kv_heads; ++head) {
      ScoreWork& w = works_[head];
      w.kind = ScoreWork::Kind::kMinMax;
      w.q = q + int64_t{head} * g.group() * g.head_dim;
      w.queries = g.group();
      const int64_t low = index.RowOffset(0, layer, 0, head, 0);
      w.rows = {context.view.index_blocks,       low,        g.head_dim * SizeOf(index.dtype),
                index.levels[0].units_per_block, g.head_dim, index.dtype};
      w.max_offset = index.RowOffset(0, layer, 1, head, 0) - low;
      w.units = pages;
      w.out = scores_.data() + count * head;
    }
    context.backend->score(works_.data(), g.kv_heads, *context.executor);
  }

  void Pick(const SelectContext& context, int head, Run pages, int32_t n, Selection* out) const {
    const int32_t count = pages.end - pages.begin;
    const int32_t k = std::min(budget_ / page_, count);
    std::vector<int32_t>& units = out->units[head];
    units.resize(k);
    context.backend->top_k({scores_.data() + int64_t{count} * head, count, k, units.data()});
    std::vector<Run>& runs = out->runs[head];
    AppendRun({0, pages.begin * page_}, &runs);
    for (int32_t& unit : units) {
      unit += pages.begin;
      AppendRun({unit * page_, (unit + 1) * page_}, &runs);
    }
    AppendRun({pages.end * page_, n}, &runs);
  }

  int32_t page_, budget_, sink_, recent_, min_tokens_;
  std::vector<float> scores_;  // [kv_heads][candidate pages] of the call under way
  std::vector<ScoreWork> works_;
};

}  // namespace

std::unique_ptr<Selector> NewMinMaxSelector(const Plan& plan, const Geometry&) {
  return std::make_unique<MinMaxSelector>(plan);
}

}  // namespace kvstrata
