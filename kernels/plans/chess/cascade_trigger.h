// SPDX-License-Identifier: Apache-2.0
// CascadeTrigger: when selector cascade selects (docs/spec/chess.md 6): at the end of the prompt,
// and when a page completes whose reported entropies, or whose number, ask for it. It sees counts
// and reports alone, so steps on a GPU decide by it, too, without asking the GPU.
//
// A value; one a sequence. Threads: one call at a time.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/plan/plan.h"

namespace kvstrata {

class Selector;  // kernels/select/selector.h

class CascadeTrigger {
 public:
  // The prompt is complete at `tokens`: a selection is due.
  void PromptDone(int32_t tokens);
  // Sees the tokens up to `now`, behind the prompt. True: a selection is due. Many tokens at once
  // ask at each page boundary inside, as one at a time would; of the selections only the last one's
  // pages can be seen, so only that one is due. entropy: nats by position, NaN: none.
  bool Advance(const Plan& plan, std::span<const float> entropy, int32_t prompt_tokens,
               int32_t now);

  // Tokens from `tokens` on are taken back. A selection that saw some of them is due again.
  void Truncate(const Plan& plan, int32_t tokens);

  // How many tokens the last selection sees, later ones unseen; its name in this process, 0 before
  // the first. A copy of the trigger has the same name.
  int32_t selected_at() const { return selected_at_; }
  uint64_t selection_id() const { return selection_id_; }
  // Selections that were due, those that a later one replaced at once included.
  int32_t selections() const { return selections_; }

  // First page of the window of a selection that sees `tokens`; 0: everything is attended.
  static int32_t WindowStart(const Plan& plan, int32_t tokens);

 private:
  bool IsDue(const Plan& plan, std::span<const float> entropy, int32_t prompt_tokens,
             int32_t page) const;
  void SelectAt(int32_t tokens);

  int32_t seen_ = 0;         // tokens
  int32_t pages_since_ = 0;  // pages completed since the last selection
  int32_t selections_ = 0;
  int32_t selected_at_ = 0;
  bool outdated_ = false;  // the last selection saw tokens that were taken back
  uint64_t selection_id_ = 0;
};

// REQUIRES: of plans whose selector is cascade.
CascadeTrigger& CascadeTriggerOf(Selector& selector);

}  // namespace kvstrata
