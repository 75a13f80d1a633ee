// SPDX-License-Identifier: Apache-2.0
// SelectionRule: what a step behind the prompt reads under a selector, whatever its queries are: a
// pure function of the plan and the sequence's length. It sizes the hot cache of pages in the
// host's memory (step/cuda_hot_pages.h) and says from which length on choosing pays
// (step/break_even.h).
//
// Pure; any thread.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/candidates.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

struct SelectionRule {
  // For one list: the most tokens that are attended whatever is chosen; units that are chosen, and
  // the tokens of each.
  int32_t always = 0;
  int32_t units = 0, unit_tokens = 1;

  // Means over steps, in rows (a key and a value of all KV heads): what attention reads, as the
  // codec holds it; what choosing reads, of raw size and as the codec holds it.
  double rows = 0;
  double scored = 0, scored_stored = 0;
  // What choosing takes beside reading, measured (docs/cuda_measured.md, docs/measured.md): on a
  // GPU for a batch, on a CPU for each sequence, in raw rows that attention reads meanwhile.
  double gpu_us = 0, cpu_rows = 0;
};

// REQUIRES: plan came from ParsePlan.
SelectionRule SelectionRuleOf(const Plan& plan, int32_t tokens);

// Whether a step behind the prompt that attends n tokens, the query's own included, attends all of
// them by plan and length alone: below min_tokens, or because the budget holds them.
bool AttendsInFull(const Plan& plan, int32_t n);

// Which units compete, how many are taken, and where all are attended: of selectors minmax,
// vote and bits, on both machines (kernels/cuda/batches/candidates.h). Each in the selector's own
// file.
cuda::CandidateRule MinMaxCandidates(const Plan& plan);
cuda::CandidateRule VoteCandidates(const Plan& plan);
cuda::CandidateRule BitsCandidates(const Plan& plan);

// Selector bucket's, whatever its codec.
SelectionRule BucketRule(const Plan& plan, int32_t tokens);

// The votes that a KV head of `group` query heads may leave out, for selector bits with max_missed,
// on both machines.
double BitsMissed(const Plan& plan, int32_t group);

}  // namespace kvstrata
