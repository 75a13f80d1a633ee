// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/span_rows.h"

#include "kernels/segment/span_rule.h"
#include "kernels/select/notice.h"

namespace kvstrata {

void RawRuns::Append(const SelectContext& context, int32_t n, std::vector<Run>* runs) {
  const SpanStorage& spans = *SpansOf(context);
  if (spans_ != &spans || version_ != context.view.version) {
    runs_.clear();
    for (const SpanStorage::Part& part : spans.parts()) {
      for (int32_t i = 0; i < part.raw_count; ++i) {
        AppendRun({part.raw_positions[i], part.raw_positions[i] + 1}, &runs_);
      }
    }
    spans_ = &spans;
    version_ = context.view.version;
  }
  runs->assign(runs_.begin(), runs_.end());
  AppendRun({spans.end(), n}, runs);
}

std::string WhyNoSpans(const Plan& plan, const SelectContext& context) {
  const int32_t prompt = context.prompt_tokens, tokens = context.view.tokens;
  if (prompt <= plan.lowrank.local)
    return Say(Notice::kPromptIsLocal, {prompt, plan.lowrank.local});
  if (!HasSurprisal(context.surprisal, {context.surprisal_held, prompt})) {
    return Say(Notice::kNoSurprisal, {prompt});
  }
  return OutgrowsRows(plan, tokens) ? Say(Notice::kSpansPending)
                                    : Say(Notice::kWithinRows, {tokens});
}

void ScoreSpans(const SelectContext& context, int layer, int kv_head, const float* q,
                int32_t queries, float* out) {
  const SpanStorage& spans = *SpansOf(context);
  std::vector<ScoreTokensWork> works;
  for (size_t p = 0; p < spans.parts().size(); ++p) {
    const SpanStorage::Part& part = spans.parts()[p];
    if (part.span_count == 0) continue;
    ScoreTokensWork& w = works.emplace_back();
    w.rows = spans.KeyMeans(static_cast<int>(p), layer, kv_head);
    w.run = {0, part.span_count};
    w.q = q;
    w.queries = queries;
    w.out = out + part.first_span;
    w.out_query = static_cast<int64_t>(spans.spans().size());
  }
  if (works.empty()) return;
  // Inline: callers are parallel over heads.
  context.backend->score_tokens(works.data(), static_cast<int64_t>(works.size()), InlineExecutor());
}

}  // namespace kvstrata
