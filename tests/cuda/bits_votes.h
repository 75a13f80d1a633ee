// SPDX-License-Identifier: Apache-2.0
// What selector bits ranks tokens by, from the quantised keys in a sequence's index on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/select/selection_rule.h"
#include "tests/cuda/step_batch_fixture.h"

namespace kvstrata::cuda {

// The sum over a KV head's queries of their softmax over the candidates, by token; 0 for others.
// With runs that of the token's run. q: [query_heads][head_dim] of a step of `n` tokens, the
// query's own counted. REQUIRES: all candidates are in sealed groups.
inline std::vector<double> BitsVotes(const TwinSequence& sequence, const Geometry& g, int layer,
                                     const float* q, int32_t n, int head) {
  const Plan& plan = sequence.plan;
  const IndexLayout& index = sequence.on_host->index();
  const Candidates tokens = CandidateTokensOf(BitsCandidates(plan), n);
  const kvstrata::Run range = {tokens.first, tokens.last};
  const int32_t count = range.end - range.begin;
  std::vector<float> logits(static_cast<size_t>(g.group() * count));
  const ScoreBitsWork w{{index.group(), sequence.blocks.host_pieces.data(),
                         index.RowOffset(0, layer, 0, head, 0), index.levels[0].units_per_block},
                        range,
                        q + int64_t{head} * g.group() * g.head_dim,
                        g.group(),
                        g.logit_scale(),
                        logits.data(),
                        count};
  FindBackend("ref").value()->score_bits(&w, 1, InlineExecutor());
  std::vector<double> votes(static_cast<size_t>(n));
  for (int i = 0; i < g.group(); ++i) {
    const auto own =
        std::span(logits).subspan(static_cast<size_t>(i * count), static_cast<size_t>(count));
    const float top = *std::ranges::max_element(own);
    double sum = 0;
    for (const float x : own) sum += std::exp(double{x} - top);
    for (int32_t t = 0; t < count; ++t) {
      votes[static_cast<size_t>(range.begin + t)] +=
          std::exp(double{own[static_cast<size_t>(t)]} - top) / sum;
    }
  }
  for (auto at = votes.begin() + range.begin; at < votes.begin() + range.end; at += plan.bits.run) {
    std::fill_n(at, plan.bits.run, std::accumulate(at, at + plan.bits.run, 0.0));
  }
  return votes;
}

}  // namespace kvstrata::cuda
