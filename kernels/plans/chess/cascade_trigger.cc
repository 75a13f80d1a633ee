// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/chess/cascade_trigger.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace kvstrata {

int32_t CascadeTrigger::WindowStart(const Plan& plan, int32_t tokens) {
  return std::max(0, (tokens + plan.index.unit - 1) / plan.index.unit - plan.cascade.recent);
}

void CascadeTrigger::SelectAt(int32_t tokens) {
  static std::atomic<uint64_t> last_id = 0;
  selected_at_ = tokens;
  outdated_ = false;
  selection_id_ = ++last_id;
}

void CascadeTrigger::PromptDone(int32_t tokens) {
  seen_ = tokens;
  pages_since_ = 0;
  ++selections_;
  SelectAt(tokens);
}

bool CascadeTrigger::Advance(const Plan& plan, std::span<const float> entropy,
                             int32_t prompt_tokens, int32_t now) {
  const bool always = plan.cascade.trigger == CascadeOptions::Trigger::kAlways;
  int32_t select_at = -1;
  for (int32_t page = seen_ / plan.index.unit; page < now / plan.index.unit; ++page) {
    ++pages_since_;
    if (always || !IsDue(plan, entropy, prompt_tokens, page)) continue;
    select_at = (page + 1) * plan.index.unit;
    pages_since_ = 0;
    ++selections_;
  }
  if (always && now > seen_) {
    select_at = now;
    selections_ += now - seen_;
  }
  if (outdated_) select_at = now;
  seen_ = now;
  if (select_at >= 0) SelectAt(select_at);
  return select_at >= 0;
}

void CascadeTrigger::Truncate(const Plan& plan, int32_t tokens) {
  if (tokens >= seen_) return;
  seen_ = tokens;
  outdated_ |= selected_at_ > tokens;
  pages_since_ = std::min(pages_since_, std::max(0, tokens - selected_at_) / plan.index.unit);
}

// Whether the completed page asks for a re-selection.
bool CascadeTrigger::IsDue(const Plan& plan, std::span<const float> entropy, int32_t prompt_tokens,
                           int32_t page) const {
  // Prompt tokens have no entropy, whatever was reported for them (docs/spec/chess.md 6).
  const auto reported = static_cast<int32_t>(entropy.size());
  const int32_t begin = std::max(page * plan.index.unit, prompt_tokens);
  const int32_t end = std::min((page + 1) * plan.index.unit, reported);
  double sum = 0, squares = 0;
  int32_t given = 0;
  for (int32_t t = begin; t < end; ++t) {
    if (std::isnan(entropy[t])) continue;
    sum += entropy[t];
    ++given;
  }
  if (plan.cascade.trigger == CascadeOptions::Trigger::kEvery || given == 0)
    return pages_since_ >= plan.cascade.every;
  const double mean = sum / given;
  for (int32_t t = begin; t < end; ++t) {
    if (std::isnan(entropy[t])) continue;
    squares += (entropy[t] - mean) * (entropy[t] - mean);
  }
  const bool mean_over = mean > plan.cascade.thresholds[0];
  const bool variance_over = squares / given > plan.cascade.thresholds[1];
  return plan.cascade.trigger_or ? mean_over || variance_over : mean_over && variance_over;
}

}  // namespace kvstrata
