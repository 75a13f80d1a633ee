// SPDX-License-Identifier: Apache-2.0
// Selections of a Step and of a CudaStep that differ by near-ties alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/plans/mosaickv/packed.h"
#include "kernels/plans/sekv/lowrank.h"
#include "tests/cuda/bits_votes.h"
#include "tests/cuda/step_batch_fixture.h"
#include "tests/kernels/rows_per_head.h"

namespace kvstrata::cuda {

// Whether two selections are the same but for units (selectors vote, bits: tokens) whose scores by
// `q` [query_heads][head_dim] are within 1 % of each other, or, of selector cascade, for pages that
// hang on scores within 1e-5 of their level's largest; *equal: they are the same. reused: both go
// on with an earlier selection.
class NearTies {
 public:
  NearTies(TwinSequence& sequence, const Geometry& g, int layer, const float* q, bool reused)
      : sequence_(sequence), g_(g), layer_(layer), q_(q), reused_(reused) {}

  bool Agree(const Selection& want, const Selection& got, bool* equal) const {
    *equal = want.runs == got.runs && want.units == got.units && want.full == got.full;
    if (sequence_.plan.selector == SelectorKind::kVote) return AgreeOnTokens(want, got);
    if (*equal) return true;
    if (sequence_.plan.selector == SelectorKind::kBits) return BitsAgree(want, got);
    if (sequence_.plan.selector == SelectorKind::kBucket) return AgreeOnSizes(want, got);
    if (want.full || got.full || want.units.size() != got.units.size()) return false;
    if (sequence_.plan.selector == SelectorKind::kZoom) return SpansAgree(want, got);
    if (sequence_.plan.selector == SelectorKind::kCascade) {
      return CascadeAgrees(want.units[0], got.units[0]);
    }
    for (int head = 0; head < g_.kv_heads; ++head) {
      const std::vector<int32_t>& a = want.units[head];
      const std::vector<int32_t>& b = got.units[head];
      if (a.size() != b.size()) return false;
      std::vector<int32_t> missing, extra;
      std::ranges::set_difference(a, b, std::back_inserter(missing));
      std::ranges::set_difference(b, a, std::back_inserter(extra));
      const std::vector<double> scores =
          sequence_.plan.codec == CodecKind::kPacked ? BlockScores(head) : Scores(want, head);
      for (const int32_t m : missing) {
        for (const int32_t e : extra) {
          if (scores[m] - scores[e] > 1e-2 * std::abs(scores[m])) return false;
        }
      }
    }
    return true;
  }

  // Selector bucket: whether a head of the prompt keeps the same tokens but for those whose
  // importance is within 0.1 % of each other's; *equal: they are the same.
  bool AgreeOnKept(int head, const std::vector<int32_t>& got, bool* equal) const {
    const auto inspected = [this](const char* name, auto value) {
      return TwinSequence::Inspected<decltype(value)>(*sequence_.on_host, sequence_.HostView(),
                                                      name);
    };
    const auto kept = inspected("kept", int32_t{}), offsets = inspected("kept_offsets", int32_t{});
    const auto importance = inspected("importance", float{});
    const auto row = static_cast<size_t>(layer_ * g_.kv_heads + head);
    const auto want = std::span(kept).subspan(static_cast<size_t>(offsets[row]),
                                              static_cast<size_t>(offsets[row + 1] - offsets[row]));
    std::vector<int32_t> missing, extra;
    std::ranges::set_difference(want, got, std::back_inserter(missing));
    std::ranges::set_difference(got, want, std::back_inserter(extra));
    *equal = missing.empty() && extra.empty();
    const size_t tokens = importance.size() / static_cast<size_t>(g_.layers * g_.kv_heads);
    for (const int32_t m : missing) {
      for (const int32_t e : extra) {
        const float a = importance[row * tokens + static_cast<size_t>(m)];
        const float b = importance[row * tokens + static_cast<size_t>(e)];
        if (a - b > 1e-3f * a) return false;
      }
    }
    return missing.size() == extra.size();
  }

 private:
  // Near-ties of scores in fp32 are too rare to ask for more; Twins counts them.
  static bool AgreeOnSizes(const Selection& want, const Selection& got) {
    return want.full == got.full && RowsPerHead(want) == RowsPerHead(got);
  }
  // The two most relevant spans expanded on one side only have one relevance: one took the other's
  // room. What is expanded after them differs because of that.
  bool SpansAgree(const Selection& want, const Selection& got) const {
    const auto logits = TwinSequence::Inspected<float>(*sequence_.on_host, sequence_.HostView(),
                                                       "relevance_logits");
    const size_t spans = SpansOf(sequence_.on_host->stored())->spans().size();
    for (size_t head = 0; head < want.units.size(); ++head) {
      std::vector<int32_t> different;
      std::ranges::set_symmetric_difference(want.units[head], got.units[head],
                                            std::back_inserter(different));
      const float* of_head = &logits[(static_cast<size_t>(layer_ * g_.query_heads) + head) * spans];
      std::ranges::sort(different, std::ranges::greater(), [&](int32_t u) { return of_head[u]; });
      if (different.size() == 1) return false;
      if (!different.empty() && of_head[different[0]] - of_head[different[1]] > 1e-3f) return false;
    }
    return true;
  }
  bool CascadeAgrees(const std::vector<int32_t>& want, const std::vector<int32_t>& got) const {
    std::vector<int32_t> missing, extra;
    std::ranges::set_difference(want, got, std::back_inserter(missing));
    std::ranges::set_difference(got, want, std::back_inserter(extra));
    if (missing.size() != extra.size()) return false;
    const Plan& plan = sequence_.plan;
    for (const int32_t m : missing) {
      bool tie = false;
      int32_t pages = 1;  // pages of a unit
      for (const auto& [name, size] : {std::pair{"page_scores", plan.index.pages_per_chunk},
                                       {"chunk_scores", plan.index.chunks_per_grid},
                                       {"grid_scores", 1}}) {
        const auto scores =
            TwinSequence::Inspected<float>(*sequence_.on_host, sequence_.HostView(), name);
        float largest = 0;
        for (const float x : scores) largest = std::max(largest, std::abs(x));
        for (const int32_t e : extra) {
          const float a = scores[static_cast<size_t>(m / pages)];
          const float b = scores[static_cast<size_t>(e / pages)];
          tie |= m / pages != e / pages && std::abs(a - b) <= 1e-5f * largest;
        }
        pages *= size;
      }
      if (!tie) return false;
    }
    return true;
  }
  bool BitsAgree(const Selection& want, const Selection& got) const {
    if (want.full || got.full || want.runs.size() != got.runs.size()) return false;
    for (int head = 0; head < g_.kv_heads; ++head) {
      const std::vector<int32_t> a = TokensOf(want, head), b = TokensOf(got, head);
      std::vector<int32_t> missing, extra;
      std::ranges::set_difference(a, b, std::back_inserter(missing));
      std::ranges::set_difference(b, a, std::back_inserter(extra));
      if (sequence_.plan.bits.max_missed > 0) {
        // Sums that are off by 5e-3 end a list a little earlier or later.
        const auto run = static_cast<size_t>(sequence_.plan.bits.run);
        if (missing.size() + extra.size() > run * (2 + a.size() / 50)) return false;
        continue;
      }
      if (a.size() != b.size()) return false;
      const std::vector<double> votes = BitsVotes(sequence_, g_, layer_, q_, want.tokens, head);
      for (const int32_t m : missing) {
        for (const int32_t e : extra) {
          if (votes[m] - votes[e] > 1e-2 * votes[m]) return false;
        }
      }
    }
    return true;
  }
  bool AgreeOnTokens(const Selection& want, const Selection& got) const {
    if (want.full || got.full) return want.full == got.full && want.runs == got.runs;
    const std::vector<int32_t> a = TokensOf(want, 0), b = TokensOf(got, 0);
    Difference d;
    std::ranges::set_difference(a, b, std::back_inserter(d.missing));
    std::ranges::set_difference(b, a, std::back_inserter(d.extra));
    if (reused_) return d == sequence_.tied[layer_];
    sequence_.tied[layer_] = d;
    if (a.size() != b.size()) return false;
    if (d.missing.empty()) return true;
    const std::vector<double> votes = Votes(want.tokens);
    for (const int32_t m : d.missing) {
      for (const int32_t e : d.extra) {
        if (votes[m] - votes[e] > 1e-2 * votes[m]) return false;
      }
    }
    return true;
  }
  static std::vector<int32_t> TokensOf(const Selection& s, int list) {
    std::vector<int32_t> tokens;
    for (const Run& run : s.runs[static_cast<size_t>(list)]) {
      for (int32_t t = run.begin; t < run.end; ++t) tokens.push_back(t);
    }
    return tokens;
  }
  // What the heads' softmax over the middle gives each token; 0 outside.
  std::vector<double> Votes(int32_t n) const {
    const Plan& plan = sequence_.plan;
    const int32_t first = plan.vote.sinks, last = n - plan.vote.recent;
    std::vector<double> votes(static_cast<size_t>(n)), weights(votes.size());
    for (int head = 0; head < g_.query_heads; ++head) {
      double sum = 0;
      for (int32_t t = first; t < last; ++t) {
        sum += weights[static_cast<size_t>(t)] =
            std::exp(Dot(head, t) / std::sqrt(double{1} * g_.head_dim));
      }
      for (int32_t t = first; t < last; ++t) {
        votes[static_cast<size_t>(t)] += weights[static_cast<size_t>(t)] / sum;
      }
    }
    return votes;
  }
  double Dot(int head, int32_t token) const {
    const PageLayout layout = PageLayout::Of(g_);
    const std::byte* const page =
        sequence_.pages.host_pieces[static_cast<size_t>(token / g_.page_tokens)];
    const std::byte* const key =
        page + layout.KeyOffset(layer_, head / g_.group(), token % g_.page_tokens);
    double sum = 0;
    for (int c = 0; c < g_.head_dim; ++c) {
      sum += double{q_[int64_t{head} * g_.head_dim + c]} *
             LoadFloat(key + c * SizeOf(g_.dtype), g_.dtype);
    }
    return sum;
  }
  // Scores of the units that compete, by id.
  std::vector<double> Scores(const Selection& s, int head) const {
    const Plan& plan = sequence_.plan;
    const int32_t first = (plan.minmax.sinks + plan.index.unit - 1) / plan.index.unit;
    const int32_t last = (s.tokens - plan.minmax.recent) / plan.index.unit;
    std::vector<double> scores(static_cast<size_t>(last), 0);
    for (int i = 0; i < g_.group(); ++i) {
      const float* q = q_ + int64_t{head * g_.group() + i} * g_.head_dim;
      std::vector<double> bounds;
      for (int32_t u = first; u < last; ++u) bounds.push_back(Bound(head, u, q));
      const double top = *std::ranges::max_element(bounds);
      double sum = 0;
      for (double& x : bounds) {
        if (plan.minmax.group_softmax) sum += x = std::exp((x - top) / std::sqrt(g_.head_dim));
      }
      for (int32_t u = first; u < last; ++u) {
        const double x = bounds[static_cast<size_t>(u - first)];
        double& score = scores[static_cast<size_t>(u)];
        score = plan.minmax.group_softmax ? score + x / sum : i == 0 ? x : std::max(score, x);
      }
    }
    return scores;
  }
  // Scores of the blocks of packed rows, by id.
  std::vector<double> BlockScores(int head) const {
    const PackedStorage& packed = *PackedOf(sequence_.on_host->stored());
    const Backend& backend = *FindBackend("ref").value();
    std::vector<double> scores;
    for (size_t s = 0; s < packed.segments().size(); ++s) {
      const PackedHead& h = packed.head(static_cast<int>(s), layer_, head);
      const kvstrata::Run tokens = packed.segments()[s].tokens;
      const int32_t blocks = (tokens.end - tokens.begin + h.block - 1) / h.block;
      std::vector<float> rotated(static_cast<size_t>(g_.group() * g_.head_dim));
      const RotateWork rotate{
          h.r_k,       g_.head_dim, false,         q_ + int64_t{head} * g_.group() * g_.head_dim,
          g_.head_dim, g_.group(),  rotated.data()};
      OpsOf<PackedOps>(backend.packed).rotate(&rotate, 1, InlineExecutor());
      std::vector<float> out(static_cast<size_t>(blocks));
      ScorePackedWork score;
      score.rows = h.blocks;
      score.q = rotated.data();
      score.queries = g_.group();
      score.units = {0, blocks};
      score.out = out.data();
      OpsOf<PackedOps>(backend.packed).score_packed(&score, 1, InlineExecutor());
      scores.insert(scores.end(), out.begin(), out.end());
    }
    return scores;
  }
  double Bound(int head, int32_t unit, const float* q) const {
    const IndexLayout& index = sequence_.on_host->index();
    const auto* blocks = sequence_.blocks.host_pieces.data();
    const std::byte* low = index.Row(blocks, 0, layer_, 0, head, unit);
    const std::byte* high = index.Row(blocks, 0, layer_, 1, head, unit);
    const int64_t size = SizeOf(index.dtype);
    const bool deviation = sequence_.plan.minmax.deviation;
    double sum = 0, variance = 0;
    for (int c = 0; c < g_.head_dim; ++c) {
      const double x = q[c], a = LoadFloat(low + c * size, index.dtype);
      const double b = LoadFloat(high + c * size, index.dtype);
      sum += deviation ? x * a : std::max(x * a, x * b);
      variance += deviation ? x * x * b : 0;
    }
    return sum + 2 * std::sqrt(variance);
  }

  TwinSequence& sequence_;
  const Geometry& g_;
  const int layer_;
  const float* q_;
  const bool reused_;
};

}  // namespace kvstrata::cuda
