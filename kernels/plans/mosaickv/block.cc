// SPDX-License-Identifier: Apache-2.0
// Selector `block`: per layer and KV head, the blocks whose mean key has the largest dot product
// with a query of the group, up to a share of the tokens (MosaicKV; docs/spec/mosaickv.md,
// "Selector").
//
//   over `packed`  blocks are those of the packed segments, scored in rotated space; what is not
//                  packed yet is always on
//   over `raw`     blocks are pages of the plan's index, scored by their dense means; always on is
//                  the last window, rounded outwards to whole blocks
// The first block is always on, and at least one other is chosen.
#include <algorithm>

#include "kernels/plans/mosaickv/block_ranges.h"
#include "kernels/plans/mosaickv/rotated_works.h"
#include "kernels/rows/score_works.h"
#include "kernels/segment/index_rows.h"
#include "kernels/select/ranking.h"
#include "kernels/select/selector_rows.h"
#include "kernels/select/unit_scores.h"

namespace kvstrata {
namespace {

// What selector block follows over raw rows from plan and length alone.
struct RawBlocks {
  RawBlocks(const Plan& plan, int32_t n)
      : budget(CeilShare(plan.block.share, n)),
        last(std::max(1, std::max(n - plan.block.recent, 0) / plan.index.unit)),
        always(std::min(plan.index.unit, n) + std::max(n - last * plan.index.unit, 0)),
        in_full(AttendsInFull(n, always, budget, plan.min_tokens)) {}

  int32_t budget;
  int32_t last;    // blocks [1, last) compete
  int32_t always;  // tokens that are read whatever is chosen
  bool in_full;
};

class RawBlockSelector final : public Selector {
 public:
  explicit RawBlockSelector(const Plan& plan) : plan_(plan) {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const int32_t block = plan_.index.unit;
    const RawBlocks blocks(plan_, n);
    if (blocks.in_full) return out->SetFull(n);

    const Run candidates = {1, blocks.last};
    scores_.Score(context, layer, q, ScoreWork::Kind::kDot, candidates, plan_.block.group_softmax);
    out->Reset(n, context.geometry->kv_heads);
    out->scored_bytes = int64_t{blocks.last - 1} * out->groups() * context.geometry->head_dim *
                        SizeOf(context.index->dtype);
    if (plan_.index.rest != RestKind::kDrop) out->coarse.resize(out->groups());
    const int32_t k = std::min(std::max(1, blocks.budget / block), blocks.last - 1);
    context.executor->ParallelFor(out->groups(), [&](int64_t head) {
      Pick(*context.backend, static_cast<int>(head), candidates, k, out);
    });
  }

  std::unique_ptr<Selector> Clone() const override {
    return std::make_unique<RawBlockSelector>(plan_);
  }

 private:
  void Pick(const Backend& backend, int head, Run candidates, int32_t k, Selection* out) const {
    std::vector<int32_t>& units = out->units[head];
    units.assign(static_cast<size_t>(k) + 1, 0);
    const int32_t count = candidates.end - candidates.begin;
    backend.top_k({scores_.Of(head), count, k, units.data() + 1});
    for (size_t i = 1; i < units.size(); ++i) units[i] += candidates.begin;
    std::vector<Run>& runs = out->runs[head];
    for (const int32_t unit : units) {
      AppendRun({unit * plan_.index.unit, (unit + 1) * plan_.index.unit}, &runs);
    }
    AppendRun({candidates.end * plan_.index.unit, out->tokens}, &runs);
    if (plan_.index.rest != RestKind::kDrop) AppendRest(candidates, units, 0, &out->coarse[head]);
  }

  Plan plan_;
  UnitScores scores_;  // the call's that is under way
};

class PackedBlockSelector final : public Selector {
 public:
  explicit PackedBlockSelector(const Plan& plan) : plan_(plan) {}

  void Select(const SelectContext& context, int layer, const float* q, Selection* out) override {
    const int32_t n = context.view.tokens + 1;
    const PackedStorage* packed = PackedOf(context);
    if (n < plan_.min_tokens || packed == nullptr || packed->end() == 0) return out->SetFull(n);
    ranges_.clear();
    for (int head = 0; head < context.geometry->kv_heads; ++head) {
      ranges_.emplace_back(*packed, layer, head);
    }
    out->Reset(n, context.geometry->kv_heads);
    out->scored_bytes = Score(context, *packed, layer, q);
    context.executor->ParallelFor(out->groups(), [&](int64_t head) {
      Pick(*context.backend, static_cast<int>(head), packed->end(), out);
    });
  }

  std::unique_ptr<Selector> Clone() const override {
    return std::make_unique<PackedBlockSelector>(plan_);
  }

 private:
  // The bytes that it read.
  int64_t Score(const SelectContext& context, const PackedStorage& packed, int layer,
                const float* q) {
    const Geometry& g = *context.geometry;
    int64_t bytes = 0;
    works_.Clear();
    scores_.resize(g.kv_heads);
    for (int head = 0; head < g.kv_heads; ++head) {
      const int64_t count = ranges_[head].count();
      scores_[head].resize(plan_.block.group_softmax ? count * g.group() : count);
      for (size_t s = 0; s < packed.segments().size(); ++s) {
        const PackedHead& own = packed.head(static_cast<int>(s), layer, head);
        ScorePackedWork w;
        w.rows = own.blocks;
        w.q = q + int64_t{head} * g.group() * g.head_dim;
        w.queries = g.group();
        w.units = {0, ranges_[head].end(s) - ranges_[head].first(s)};
        w.out = scores_[head].data() + ranges_[head].first(s);
        if (plan_.block.group_softmax) {
          w.scale = g.logit_scale();
          w.out_query = count;
        }
        works_.Add(w, own.r_k, {.q = w.q, .rows = w.queries, .dim = g.head_dim});
        bytes += w.units.end * w.rows.stride;
      }
    }
    works_.Run(*context.backend, *context.executor);
    if (plan_.block.group_softmax) SumGroups(context);
    return bytes;
  }

  // Candidates are all blocks but the first, which is always on.
  void SumGroups(const SelectContext& context) {
    for (size_t head = 0; head < scores_.size(); ++head) {
      const int32_t count = ranges_[head].count();
      std::vector<float> sums(count);
      SumSoftmax(*context.backend, *context.executor, scores_[head].data() + 1, count,
                 context.geometry->group(), count - 1, sums.data() + 1, &sums_);
      scores_[head] = std::move(sums);
    }
  }

  // The first block, then others by descending score until one exceeds the budget; at least one.
  void Pick(const Backend& backend, int head, int32_t packed_end, Selection* out) const {
    const BlockRanges& ranges = ranges_[head];
    const float* scores = scores_[head].data() + 1;
    const int32_t budget = CeilShare(plan_.block.share, out->tokens);
    std::vector<int32_t>& units = out->units[head];
    if (!PickUnranked(backend, ranges, scores, budget, &units)) {
      units.assign(1, 0);
      int32_t room = budget;
      VisitRanked(scores, ranges.count() - 1, [&](int32_t i) {
        const int32_t size = ranges.Size(i + 1);
        if (units.size() > 1 && size > room) return false;
        units.push_back(i + 1);
        room -= size;
        return true;
      });
    }
    std::ranges::sort(units);
    std::vector<Run>& runs = out->runs[head];
    for (const int32_t id : units) AppendRun(ranges.Tokens(id), &runs);
    AppendRun({packed_end, out->tokens}, &runs);
  }

  // As many blocks as fit whatever their sizes are; no order among them matters. False if the one
  // that comes next would fit as well.
  static bool PickUnranked(const Backend& backend, const BlockRanges& ranges, const float* scores,
                           int32_t budget, std::vector<int32_t>* units) {
    const int32_t n = ranges.count() - 1;
    const int32_t fit = std::min(std::max(1, budget / ranges.largest()), n);
    units->assign(static_cast<size_t>(std::min(fit + 1, n)) + 1, 0);
    int32_t* const best = units->data() + 1;
    backend.top_k({scores, n, std::min(fit + 1, n), best});
    if (fit < n) {
      std::swap(*LastRanked(scores, best, fit + 1), best[fit]);
      int32_t room = budget - ranges.Size(best[fit] + 1);
      for (int32_t i = 0; i < fit; ++i) room -= ranges.Size(best[i] + 1);
      if (room >= 0) return false;
      units->pop_back();
    }
    for (int32_t i = 0; i < fit; ++i) ++best[i];
    return true;
  }

  Plan plan_;

  // Scratch for the current call.
  std::vector<BlockRanges> ranges_;  // by KV head
  // By KV head the scores of its blocks: the maximum over the group, or the sum of softmaxes.
  std::vector<std::vector<float>> scores_;
  PackedScores works_;
  std::vector<float> sums_;
};

// Over codec packed, blocks are the codec's, and what is not packed yet is always attended.
using BlockOption = RowsOf<&Plan::block>;
constexpr PlanOption kBlockOptions[] = {
    BlockOption::Int<&BlockOptions::recent, 1, kMaxTokens>("n_recent").Or("recent").If(OverRaw),
    kUnitRow.If(OverRaw),
    BlockOption::Number<&BlockOptions::share, kShare>("share"),
    BlockOption::Name<&BlockOptions::group_softmax, kGroupNames>("group"),
    kRestRow.If(OverRaw),
};

// Choosing reads a key a block.
SelectionRule Rule(const Plan& plan, int32_t tokens) {
  const bool packed = plan.codec == CodecKind::kPacked;
  SelectionRule rule;
  rule.rows = plan.block.share * tokens;
  rule.scored_stored =
      static_cast<double>(tokens) / (packed ? plan.packed.block : plan.index.unit) / 2;
  rule.gpu_us = 9;
  rule.cpu_rows = 570;
  return rule;
}

bool InFull(const Plan& plan, int32_t n) { return RawBlocks(plan, n).in_full; }

constexpr Combination kCodecs[] = {
    {CodecKind::kPacked, SegmenterKind::kLoss,
     "its blocks over codec 'packed' are those of the packed segments, which segmenter 'loss' "
     "cuts"},
    {CodecKind::kRaw, SegmenterKind::kPage,
     "its blocks over codec 'raw' are pages, whose means only segmenter 'page' keeps"},
};

}  // namespace

constinit const Preset kBlockPreset = {
    .description =
        "MosaicKV: keys and values packed to about a third, a tenth of the blocks attended",
    .options = {kBlockOptions},
    .codecs = kCodecs};
constinit const SelectorRow kBlockSelector = {MakeSelector<RawBlockSelector>, NeedsPromptsEnd, Rule,
                                              InFull};
constinit const SelectorRow kPackedBlockSelector = {MakeSelector<PackedBlockSelector>,
                                                    NeedsPromptsEnd, Rule, NeverByBudget};

}  // namespace kvstrata
