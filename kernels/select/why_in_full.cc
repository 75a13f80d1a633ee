// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/why_in_full.h"

#include <algorithm>

#include "kernels/select/notice.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

std::string WhyShort(const Plan& plan, int32_t tokens) {
  if (tokens >= plan.min_tokens) return "";
  if (plan.min_tokens == kMostMinTokens) return Say(Notice::kNeverPays, {plan.min_tokens});
  return Say(Notice::kShort, {tokens, plan.min_tokens});
}

// Selector vote chooses for the prompt's chunks, too.
std::string WhyPrompt(const Plan& plan, bool prompt_complete) {
  if (prompt_complete || plan.selector == SelectorKind::kVote) return "";
  return Say(Notice::kPromptOpen);
}

// The first length above `n` that is not attended in full, or the largest that there is.
int32_t ChoosesFrom(const Plan& plan, int32_t n) {
  int32_t low = n, high = n;
  while (high < kMostMinTokens && AttendsInFull(plan, high)) {
    low = high;
    high = std::min(2 * std::max(high, 1), kMostMinTokens);
  }
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (AttendsInFull(plan, middle) ? low : high) = middle;
  }
  return high;
}

}  // namespace

std::string WhyNotAtWork(const Plan& plan, int32_t tokens, bool prompt_complete) {
  std::string why = WhyShort(plan, tokens);
  return why.empty() ? WhyPrompt(plan, prompt_complete) : why;
}

std::string WhyInFull(const Plan& plan, int32_t tokens, bool prompt_complete) {
  if (plan.selector == SelectorKind::kFull) return Say(Notice::kReadsAll);
  std::string why = WhyNotAtWork(plan, tokens, prompt_complete);
  const int32_t n = tokens + 1;  // the next step's own token counts
  if (!why.empty() || !AttendsInFull(plan, n)) return why;
  return Say(Notice::kWithinBudget, {tokens, ChoosesFrom(plan, n) - 1});
}

}  // namespace kvstrata
