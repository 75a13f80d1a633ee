// SPDX-License-Identifier: Apache-2.0
// What selector bucket (SentenceKV; docs/spec/sentencekv.md) follows from a plan and lengths alone,
// for its steps on CPUs (bucket.cc) and on GPUs (kernels/plans/sentencekv/gpu/cuda_bucket.cc).
//
// Pure; any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/select/selector.h"

namespace kvstrata {

// Whether a sequence of n tokens is attended in full whatever its buckets are.
inline bool BucketsInFull(const Plan& plan, int32_t n) {
  return AttendsInFull(n, plan.bucket.sinks + plan.bucket.recent, plan.bucket.budget,
                       plan.min_tokens);
}

// A sentence's tokens but the first ones of the sequence, which are in no bucket. May be empty.
inline Run BucketTokens(const Plan& plan, const Run& sentence) {
  return {std::max(sentence.begin, plan.bucket.sinks), sentence.end};
}

// What of a prompt is kept.
struct KeptOfPrompt {
  KeptOfPrompt(const Plan& plan, int32_t prompt)
      : queries(std::min(plan.bucket.n_obs, prompt)),
        before(prompt - queries),
        first(std::min(plan.bucket.sinks, before)),
        window{std::max(before, plan.bucket.sinks), prompt} {
    const auto most = static_cast<int64_t>(std::floor(plan.bucket.r * plan.bucket.budget + 1e-9));
    ranked = static_cast<int32_t>(std::min<int64_t>(most, before - first));
  }
  bool all() const { return ranked == before - first; }
  int32_t count() const { return ranked + std::max(window.end - window.begin, 0); }

  int32_t queries;  // that judge
  int32_t before;   // tokens [first, before) are judged
  int32_t first;
  int32_t ranked;  // how many of them are kept, the most important
  Run window;
};

}  // namespace kvstrata
