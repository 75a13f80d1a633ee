// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_needs.h"

#include "kernels/codec/codec.h"
#include "kernels/select/selector.h"

namespace kvstrata {
namespace {

constexpr NeedText kTexts[] = {
    {kNeedTokenIds, "token_ids",
     "the true ids of all tokens, when a sequence is opened and in every step: held prefixes are "
     "found by them"},
    {kNeedPrefillDone, "prefill_done",
     "kvs_prefill_done when the prompt is complete: what the plan makes of a prompt is made there"},
    {kNeedSurprisal, "surprisal",
     "of every prompt token, by kvs_report: without it there are no spans, and everything is "
     "attended in full"},
    {kNeedEntropy, "entropy",
     "of every generated token, by kvs_report: without it a selection is made anew every so many "
     "pages"},
    {kNeedBoundary, "boundary",
     "where sentences end, by kvs_report or by the model's boundary_tokens: without those of the "
     "prompt everything is attended in full, without later ones sentences have a fixed length"},
    {kNeedPromptQueries, "prompt_queries",
     "kvs_attend with the queries of the prompt's last n_obs tokens, in every layer: without them "
     "everything is attended in full"},
};

}  // namespace

std::span<const NeedText> NeedTexts() { return kTexts; }

uint32_t NeedsOf(const Plan& plan) {
  return kNeedTokenIds | SelectorNeeds(plan) | CodecNeeds(plan);
}

std::string DescribeNeeds(uint32_t needs) {
  std::string text;
  for (const NeedText& t : kTexts) {
    if ((needs & t.need) == 0) continue;
    text +=
        std::string(text.empty() ? "" : "\n") + std::string(t.name) + ": " + std::string(t.text);
  }
  return text;
}

}  // namespace kvstrata
