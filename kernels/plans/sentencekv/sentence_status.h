// SPDX-License-Identifier: Apache-2.0
// What selector bucket says of itself, for its steps on CPUs and on GPUs, which keep the prompt's
// queries in different places. Private to the plan and to kernels/step.
#pragma once

#include <string>

#include "kernels/plans/sentencekv/bucket_rule.h"
#include "kernels/select/notice.h"
#include "kernels/select/selector.h"

namespace kvstrata {

inline bool HasPromptBoundaries(const SelectContext& context) {
  return context.boundary.size() >= static_cast<size_t>(context.prompt_tokens);
}

// observed: the prompt's last queries passed through steps, or its buckets were made without them.
// REQUIRES: context.prompt_tokens >= 0.
inline std::string SentenceStatus(const Plan& plan, const SelectContext& context, bool observed) {
  const int32_t prompt = context.prompt_tokens;
  const auto known = static_cast<int64_t>(context.boundary.size());
  if (!HasPromptBoundaries(context)) return Say(Notice::kNoBoundaries, {known, prompt});
  if (!observed) return Say(Notice::kNoPromptQueries, {plan.bucket.n_obs});
  if (context.view.tokens - prompt > plan.bucket.max_length && known <= prompt) {
    return Say(Notice::kNoGeneratedBoundaries, {plan.bucket.max_length});
  }
  return "";
}

}  // namespace kvstrata
