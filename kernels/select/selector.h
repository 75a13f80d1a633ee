// SPDX-License-Identifier: Apache-2.0
// Selector: which rows does this query need? (The second axis of docs/plans.md.)
//
// A selector belongs to one sequence and keeps what it needs between steps. It reads summaries and
// scores, never values; it moves no bytes, takes no lock, knows no transport. It only emits a
// Selection. Implementations: fixed_selection.cc (of full.cc and window.cc) minmax.cc cascade.cc
// vote.cc bucket.cc zoom.cc block.cc bits.cc, one row each in selector_rows.h.
// Threads: one call at a time for a selector. Deterministic: ties go to the lower index.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan.h"
#include "kernels/rows/select_context.h"
#include "kernels/rows/selection.h"

namespace kvstrata {

// Queries of `count` prompt tokens from position `first` on: query token i, head h at
// q + i * q_token + h * head_dim (floats).
struct PromptQueries {
  const float* q = nullptr;
  int64_t q_token = 0;
  int32_t first = 0, count = 0;
  bool again = false;  // the same were given for this layer before
};

// What a selector keeps from step to step beside what its Selects chose.
class SelectorHistory {
 public:
  virtual ~SelectorHistory() = default;

  // Rare work before a step, for all layers at once; summaries of all complete units below
  // view.tokens are there. CHESS decides and makes its re-selection here (ADR 2).
  virtual void Begin(const SelectContext& context) = 0;

  // The prompt is complete: context.prompt_tokens == context.view.tokens. Without ops in `context`
  // steps on a GPU do the work; what counts and reports decide is decided here all the same.
  virtual void PrefillDone(const SelectContext& context) = 0;

  // The step's `count` new tokens are committed; their queries were those of the last Selects.
  virtual void Advance(int32_t count) = 0;

  // Tokens from `tokens` on are taken back: forgets what came of them. What it had chosen by them
  // it chooses anew. Not in a step.
  virtual void Truncate(int32_t tokens) = 0;
};

class Selector {
 public:
  virtual ~Selector() = default;

  // Its own; null: every selection follows from the step alone.
  virtual SelectorHistory* history() { return nullptr; }

  // The selection of `layer` for a step whose first new token is row n - 1, so n = view.tokens + 1.
  // q [query_heads][head_dim], unscaled, of that token. What it changes in the selector's state
  // takes effect with Advance; without it (an aborted step) the next Select finds the old state.
  virtual void Select(const SelectContext& context, int layer, const float* q, Selection* out) = 0;

  // The selection of a prompt chunk from the tokens before it, whose keys are in the pages; the
  // chunk itself is attended causally. In order, for each layer that is not dense. False: attend in
  // full.
  virtual bool SelectChunk(const SelectContext& context, int layer, const PromptQueries& queries,
                           Selection* out) {
    (void)context, (void)layer, (void)queries, (void)out;
    return false;
  }

  // What the plan's status should say of it; "" nothing.
  virtual std::string StatusText(const SelectContext& context) const {
    (void)context;
    return "";
  }

  // A copy for a forked sequence.
  virtual std::unique_ptr<Selector> Clone() const = 0;

  // NOT_FOUND INSPECT_UNKNOWN lists the names there are; without a text there are none.
  virtual Result<InspectArray> Inspect(const SelectContext& context, std::string_view name) const {
    (void)context, (void)name;
    return NotFound("INSPECT_UNKNOWN", "");
  }
};

// REQUIRES: plan came from ParsePlan.
std::unique_ptr<Selector> NewSelector(const Plan& plan, const Geometry& geometry);

// What its selector asks of the engine: a sum of Needs (kernels/plan/plan_needs.h).
uint32_t SelectorNeeds(const Plan& plan);

// Whether a common rule asks for full attention (docs/spec/README.md).
inline bool AttendsInFull(int32_t n, int32_t always_on, int32_t budget, int32_t min_tokens) {
  return n < min_tokens || always_on + budget >= n;
}

}  // namespace kvstrata
