// SPDX-License-Identifier: Apache-2.0
// Which units compete in a step: one rule for the host and for kernels, which read `tokens` on the
// device, so that a captured graph follows a growing sequence.
//
// Units are of `unit_tokens` consecutive tokens. Sinks and the recent window are always attended
// and rounded outwards to whole units (kernels/plans/quest/minmax.cc; with unit_tokens 1, vote.cc).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVS_HOST_DEVICE __host__ __device__
#else
#define KVS_HOST_DEVICE
#endif

namespace kvstrata::cuda {

// As `tokens` of a sequence: nothing is to be selected for it in this call, and op pick leaves its
// selection as it is.
inline constexpr int32_t kNoQuery = -1;

struct CandidateRule {
  int32_t unit_tokens = 1;
  int32_t sink_tokens = 0, recent_tokens = 0;
  int32_t take = 0;        // units to take from the candidates: floor(budget / unit_tokens)
  int32_t min_tokens = 0;  // shorter sequences are attended in full
};

struct Candidates {
  int32_t first = 0, last = 0;  // units [first, last)
  bool full = false;            // the sequence is attended in full: nothing to score or to pick
  KVS_HOST_DEVICE int32_t count() const { return last - first; }
};

// `tokens` counts the query's own, as N does in docs/spec/README.md.
KVS_HOST_DEVICE inline Candidates CandidatesOf(const CandidateRule& rule, int32_t tokens) {
  Candidates c;
  c.first = (rule.sink_tokens + rule.unit_tokens - 1) / rule.unit_tokens;
  c.last = (tokens - rule.recent_tokens) / rule.unit_tokens;
  if (c.last < c.first) c.last = c.first;
  // always-on + budget >= N says the same in tokens.
  c.full = tokens < rule.min_tokens || rule.take >= c.count();
  return c;
}

// The same, counted in tokens.
KVS_HOST_DEVICE inline Candidates CandidateTokensOf(const CandidateRule& rule, int32_t tokens) {
  Candidates c = CandidatesOf(rule, tokens);
  c.first *= rule.unit_tokens;
  c.last *= rule.unit_tokens;
  return c;
}

}  // namespace kvstrata::cuda
