// SPDX-License-Identifier: Apache-2.0
// From how many tokens on a plan is worth its selection: what min_tokens = "auto" stands for
// (docs/plans.md, "min_tokens").
//
// A layer of a decode step takes as long as the bytes that it reads, and attending fewer rows saves
// theirs. Against that stands what choosing them costs: on a GPU kernels that wait for one another,
// so many microseconds for a whole batch; on a CPU work that grows with the sequence's model, so
// many rows for each sequence. The break-even length is where the two are equal. Its constants are
// measured (docs/cuda_measured.md, docs/measured.md), not asked of the machine at hand: a
// sequence's answers, and the keys of what is stored of its prompt, are the same at every start.
//
// The number is that of a plan, a model and the batch that the plan names, not of the batch of a
// step: what a sequence attends does not depend on who is decoded beside it.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "kernels/plan/plan.h"

namespace kvstrata {

// Where a sequence's steps run.
enum class StepsOn : uint8_t { kCpu, kGpu };

// What selecting saves in a layer of a decode step of plan.batch sequences of `tokens` tokens, in
// bytes that attention reads in the same time; below 0: what it costs. 0 for plans that never
// select.
double SavedBytes(const Plan& plan, const Geometry& geometry, StepsOn where, int32_t tokens);

// The least number of tokens from which on selecting saves time, rounded up to a multiple of 64; 0
// for plans that never select; the largest that min_tokens may be where selecting never pays (an
// index as large as the rows).
int32_t BreakEvenTokens(const Plan& plan, const Geometry& geometry, StepsOn where);

// The plan that a sequence runs: `plan`, a number for min_tokens = "auto".
Plan WithMinTokens(Plan plan, const Geometry& geometry, StepsOn where);

}  // namespace kvstrata
