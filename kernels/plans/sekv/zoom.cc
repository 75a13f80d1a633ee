// SPDX-License-Identifier: Apache-2.0
// Selector `zoom`: per query head, which spans are read token by token; all others are read as one
// coarse row each (SeKV; docs/spec/sekv.md 6, 7). Raw rows are always on.
//
// Relevance is compared as a logit: q' = W q against W k_mean / |W k_mean|, plus ln |S|, so that
// one read of the mean keys serves all heads of a group. Without trained parameters it is the logit
// that the coarse row has in attention. Over a budget, spans are expanded in descending relevance;
// one that does not fit into the room that is left is passed over.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan_rows.h"
#include "kernels/plans/sekv/span_rows.h"
#include "kernels/plans/sekv/zoom_budget.h"
#include "kernels/select/notice.h"
#include "kernels/select/ranking.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/unit_scores.h"

namespace kvstrata {
namespace {

// Logits that are kept for Inspect, all layers together.
constexpr int64_t kLogitsKept = int64_t{4} << 20;

// ln(tau / (1 - tau)): comparing logits keeps the order where sigmoids have rounded to 1.
double ThresholdLogit(double tau) {
  if (tau <= 0) return -std::numeric_limits<double>::infinity();
  if (tau >= 1) return std::numeric_limits<double>::infinity();
  return std::log(tau / (1 - tau));
}

class ZoomSelector final : public Selector {
 public:
  ZoomSelector(const Plan& plan, const Geometry& geometry)
      : plan_(plan), geometry_(geometry), kept_(geometry.layers) {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const SpanStorage* const spans = SpansOf(context);
    if (spans == nullptr || ZoomsInFull(plan_, n)) return out->SetFull(n);
    const int64_t room = ZoomRoom(plan_, *spans, n);
    const int32_t least = LeastRows(*spans);
    logits_.resize(static_cast<size_t>(geometry_.query_heads) * spans->spans().size());
    out->Reset(n, geometry_.query_heads);
    out->coarse.resize(geometry_.query_heads);
    out->scored_bytes = ZoomScoredBytes(*spans, geometry_);
    context.executor->ParallelFor(geometry_.kv_heads, [&](int64_t head) {
      ScoreGroup(context, layer, static_cast<int>(head), q);
      for (int g = 0; g < geometry_.group(); ++g) {
        Expand(context, layer, static_cast<int>(head) * geometry_.group() + g, room, least, out);
      }
    });
    out->runs.resize(1);  // raw rows are the same for all heads
    raw_.Append(context, n, &out->runs[0]);
    Keep(layer);
  }

  std::string StatusText(const SelectContext& context) const override {
    if (context.prompt_tokens < 0) return "";
    const SpanStorage* const spans = SpansOf(context);
    if (spans == nullptr) return WhyNoSpans(plan_, context);
    std::string text;
    if (!spans->trained()) text = Say(Notice::kUntrained);
    const int32_t n = context.view.tokens;
    const int64_t budget = ZoomBudget(plan_, n), persistent = PersistentRows(*spans, n);
    if (budget == 0 || persistent <= budget) return text;
    return text + (text.empty() ? "" : "; ") +
           Say(Notice::kRowsTooFew, {budget, persistent, persistent, persistent});
  }

  std::unique_ptr<Selector> Clone() const override {
    auto copy = std::make_unique<ZoomSelector>(plan_, geometry_);
    copy->kept_ = kept_;
    return copy;
  }

  Result<InspectArray> Inspect(const SelectContext&, std::string_view name) const override {
    if (name != "relevance_logits") {
      return NotFound("INSPECT_UNKNOWN",
                      "array '" + std::string(name) + "': selector 'zoom' keeps relevance_logits");
    }
    std::vector<float> all;
    for (const auto& logits : kept_) all.insert(all.end(), logits.begin(), logits.end());
    const int64_t heads = int64_t{geometry_.layers} * geometry_.query_heads;
    return ArrayOf(
        InspectArray::Type::kF32,
        {geometry_.layers, geometry_.query_heads, static_cast<int64_t>(all.size()) / heads}, all);
  }

 private:
  // W^T W q / sqrt(d') of a query head.
  void Pull(const SpanStorage& spans, int layer, int query_head, const float* q, float* out) const {
    const float* w = spans.Router(layer, query_head);
    const int32_t dim = geometry_.head_dim, routes = spans.d_route();
    std::vector<double> pulled(dim);
    for (int32_t r = 0; r < routes; ++r) {
      const float* row = w + int64_t{r} * dim;
      double dot = 0;
      for (int32_t c = 0; c < dim; ++c) dot += double{row[c]} * q[c];
      for (int32_t c = 0; c < dim; ++c) pulled[c] += dot * row[c];
    }
    const double scale = 1 / std::sqrt(static_cast<double>(routes));
    for (int32_t c = 0; c < dim; ++c) out[c] = static_cast<float>(pulled[c] * scale);
  }

  // Logits of a KV head's query heads.
  void ScoreGroup(const SelectContext& context, int layer, int head, const float* q) {
    const SpanStorage& spans = *SpansOf(context);
    const auto count = static_cast<int64_t>(spans.spans().size());
    float* const logits = logits_.data() + int64_t{head} * geometry_.group() * count;
    if (spans.trained()) return ScoreRouted(context, layer, head, q, logits);
    const float* of_group = q + int64_t{head} * geometry_.group() * geometry_.head_dim;
    ScoreSpans(context, layer, head, of_group, geometry_.group(), logits);
    const float scale = geometry_.logit_scale();
    const std::vector<float>& log_length = spans.log_length();
    for (int64_t i = 0; i < geometry_.group() * count; ++i) {
      logits[i] = logits[i] * scale + log_length[static_cast<size_t>(i % count)];
    }
  }

  // Scores spans by trained routers.
  void ScoreRouted(const SelectContext& context, int layer, int head, const float* q,
                   float* logits) const {
    const SpanStorage& spans = *SpansOf(context);
    const auto count = static_cast<int64_t>(spans.spans().size());
    const int32_t group = geometry_.group(), dim = geometry_.head_dim;
    std::vector<float> pulled(int64_t{group} * dim);
    for (int g = 0; g < group; ++g) {
      const int h = head * group + g;
      Pull(spans, layer, h, q + int64_t{h} * dim, pulled.data() + int64_t{g} * dim);
    }
    ScoreSpans(context, layer, head, pulled.data(), group, logits);
    for (int g = 0; g < group; ++g, logits += count) {
      for (size_t p = 0; p < spans.parts().size(); ++p) {
        const SpanStorage::Part& part = spans.parts()[p];
        const float* inverse = spans.InverseNorms(static_cast<int>(p), layer, head * group + g);
        for (int32_t u = 0; u < part.span_count; ++u) {
          const int32_t span = part.first_span + u;
          logits[span] = logits[span] * inverse[u] + spans.log_length()[span];
        }
      }
    }
  }

  // Rows that the shortest span adds: what has less room expands nothing any more.
  static int32_t LeastRows(const SpanStorage& spans) {
    int32_t least = std::numeric_limits<int32_t>::max();
    for (const Run& s : spans.spans()) least = std::min(least, s.end - s.begin - 1);
    return least;
  }

  void Expand(const SelectContext& context, int layer, int query_head, int64_t room, int32_t least,
              Selection* out) const {
    const SpanStorage& spans = *SpansOf(context);
    const auto count = static_cast<int32_t>(spans.spans().size());
    const float* logits = logits_.data() + int64_t{query_head} * count;
    const double threshold = ThresholdLogit(spans.Threshold(layer, query_head));
    std::vector<int32_t>& expanded = out->units[query_head];
    VisitRanked(logits, count, [&](int32_t span) {
      if (!(double{logits[span]} > threshold)) return false;
      const Run tokens = spans.spans()[span];
      const int32_t more = tokens.end - tokens.begin - 1;
      if (more <= room) {
        expanded.push_back(span);
        room -= more;
      }
      return room >= least;
    });
    std::ranges::sort(expanded);
    AppendRest({0, count}, expanded, 0, &out->coarse[query_head]);
  }

  void Keep(int layer) {
    kept_[layer].clear();
    if (static_cast<int64_t>(logits_.size()) * geometry_.layers <= kLogitsKept) {
      kept_[layer] = logits_;
    }
  }

  Plan plan_;
  Geometry geometry_;
  std::vector<std::vector<float>>
      kept_;  // by layer: logits [query_heads][spans] of the last Select

  // Scratch for the current call.
  RawRuns raw_;
  std::vector<float> logits_;
};

using ZoomOption = RowsOf<&Plan::zoom>;
constexpr PlanOption kZoomOptions[] = {
    ZoomOption::Int<&ZoomOptions::rows, -1, kMaxTokens>("rows"),
    ZoomOption::Number<&ZoomOptions::rows_share, kShare>("rows_share"),
};

SelectionRule Rule(const Plan& plan, int32_t tokens) {
  SelectionRule rule;
  rule.rows = plan.zoom.rows_share * tokens;
  if (plan.zoom.rows >= 0) rule.rows = plan.zoom.rows > 0 ? plan.zoom.rows : tokens;
  return rule;
}

constexpr Combination kCodecs[] = {{CodecKind::kLowRank, SegmenterKind::kSpan, kSpansOnly}};

}  // namespace

constinit const Preset kZoomPreset = {
    .description =
        "SeKV: per layer and head, spans as one row each, expanded from low-rank "
        "factors where a query asks for it",
    .options = {kZoomOptions},
    .codecs = kCodecs,
    .why_no_other =
        "it chooses at which resolution a span is read, and only codec 'lowrank' "
        "stores spans at two"};
constinit const SelectorRow kZoomSelector = {MakeSelector<ZoomSelector>, NeedsPromptsEnd, Rule,
                                             ZoomsInFull};

}  // namespace kvstrata
