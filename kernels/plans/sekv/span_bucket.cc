// SPDX-License-Identifier: Apache-2.0
// Selector `bucket` over codec `lowrank`: the spans whose mean key is nearest to the mean query of
// the sentence being generated, expanded up to tau tokens (docs/spec/sentencekv.md 5, 6 on the
// spans of docs/spec/sekv.md). A span is expanded whole: the first that does not fit ends the list.
// Anchors and other raw rows are always on; spans that are not chosen are not attended, as
// SentenceKV has it.
#include <algorithm>

#include "kernels/plans/sekv/span_rows.h"
#include "kernels/select/ranking.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/sentence_queries.h"

namespace kvstrata {
namespace {

class SpanBucketSelector final : public Selector, private SelectorHistory {
 public:
  SpanBucketSelector(const Plan& plan, const Geometry& geometry)
      : plan_(plan),
        geometry_(geometry),
        group_(plan.bucket.per_query_head ? 1 : geometry.group()),
        queries_(geometry, plan.bucket.max_length) {}

  SelectorHistory* history() override { return this; }

  void PrefillDone(const SelectContext& context) override { queries_.Start(context.prompt_tokens); }
  void Begin(const SelectContext& context) override {
    if (context.prompt_tokens >= 0) queries_.Close(context.boundary, context.view.tokens);
  }

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const int32_t rows = geometry_.query_heads / group_;
    q_.resize(int64_t{rows} * geometry_.head_dim);
    queries_.Mean(layer, context.view.tokens, q, group_, q_.data());
    if (SpansOf(context) == nullptr || n < plan_.min_tokens) return out->SetFull(n);
    out->Reset(n, rows);
    context.executor->ParallelFor(rows, [&](int64_t row) {
      Choose(context, layer, static_cast<int>(row), &out->units[row]);
    });
    out->runs.resize(1);  // raw rows are the same for all heads
    raw_.Append(context, n, &out->runs[0]);
  }

  void Advance(int32_t) override { queries_.Advance(); }

  void Truncate(int32_t tokens) override { queries_.Truncate(tokens); }

  std::string StatusText(const SelectContext& context) const override {
    if (context.prompt_tokens < 0 || SpansOf(context) != nullptr) return "";
    return WhyNoSpans(plan_, context);
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<SpanBucketSelector>(plan_, geometry_);
    copy->queries_ = queries_;
    copy->queries_.Forget();
    return copy;
  }

 private:
  // Spans by descending similarity while they fit.
  void Choose(const SelectContext& context, int layer, int row,
              std::vector<int32_t>* chosen) const {
    const std::vector<Run>& spans = SpansOf(context)->spans();
    std::vector<float> scores(spans.size());
    const float* q = q_.data() + int64_t{row} * geometry_.head_dim;
    ScoreSpans(context, layer, row * group_ / geometry_.group(), q, 1, scores.data());
    int32_t room = plan_.bucket.budget;
    VisitRanked(scores.data(), static_cast<int32_t>(scores.size()), [&](int32_t span) {
      const int32_t tokens = spans[span].end - spans[span].begin;
      if (tokens > room) return false;
      chosen->push_back(span);
      room -= tokens;
      return true;
    });
    std::ranges::sort(*chosen);
  }

  Plan plan_;
  Geometry geometry_;
  int32_t group_;  // query heads that choose together
  SentenceQueries queries_;

  // Scratch for the current call.
  RawRuns raw_;
  std::vector<float> q_;
};

}  // namespace

constinit const SelectorRow kSpanBucketSelector = {MakeSelector<SpanBucketSelector>, NeedsSentences,
                                                   BucketRule, NeverByBudget};

}  // namespace kvstrata
