// SPDX-License-Identifier: Apache-2.0
// Parts of a prompt without its local window, one a Run; generated text stays raw.
//
// All state lies in the extents and in what was reported: where the last part ends.
#include "kernels/plans/sekv/lowrank_recompressor.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/codec/head_loop.h"
#include "kernels/plans/sekv/lowrank.h"
#include "kernels/plans/sekv/lowrank_layout.h"
#include "kernels/plans/sekv/lowrank_writer.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {
namespace {

class SpanRecompressor final : public Recompressor {
 public:
  SpanRecompressor(const Plan& plan, const Geometry& geometry,
                   std::shared_ptr<const SpanParameters> parameters, int64_t part_bytes)
      : plan_(plan),
        geometry_(geometry),
        parameters_(std::move(parameters)),
        part_tokens_(std::max<int64_t>(part_bytes / RawBytes(geometry, 1), 1)) {
    KVS_CHECK(parameters_ == nullptr ||
              (parameters_->layers == geometry.layers && parameters_->r_max == plan.lowrank.r_max &&
               parameters_->query_heads == geometry.query_heads &&
               parameters_->head_dim == geometry.head_dim));
  }

  bool Due(const RecompressInput& input) const override {
    const Tokens next = NextRange(input);
    return next.begin < next.end;
  }

  int64_t ReleasableBytes(const RecompressInput& input) const override {
    const Tokens next = NextRange(input);
    return RawBytes(geometry_, next.end - next.begin);
  }

  Result<RecompressOutput> Run(const RecompressInput& input) override {
    const Tokens next = NextRange(input);
    const int32_t held = input.view.extent_count;
    RecompressOutput output = {KeepFirst(input.view, held), {}};
    if (next.begin >= next.end) {
      output.released = ReleasedRows(input, EndOf(input.view));
      return output;
    }
    const SpanRange range = RangeOf(input, next);
    KVS_ASSIGN_OR_RETURN(SpanExtents e,
                         WriteSpans(input, geometry_, plan_, parameters_.get(), range));
    output.extents.push_back({-1, std::move(e.summary), range.tokens, Tier::kDevice});
    output.extents.push_back({-1, std::move(e.factors), range.tokens, plan_.lowrank.factors});
    output.extents.push_back({-1, std::move(e.raw), range.tokens, Tier::kDevice});
    output.released = ReleasedRows(input, range.tokens.end);
    return output;
  }

  RecompressReads Reads(const RecompressInput& input) const override {
    const Tokens next = NextRange(input);
    if (next.begin >= next.end) return {};
    return {RangeOf(input, next).tokens, {}};
  }

  std::unique_ptr<Recompressor> Clone() const override {
    return std::make_unique<SpanRecompressor>(*this);
  }

 private:
  using Tokens = kvstrata::Run;

  static int32_t EndOf(const SequenceView& view) {
    return view.extent_count == 0 ? 0 : view.extents[view.extent_count - 1].tokens.end;
  }

  // What is still to be done of the prompt; empty: nothing.
  Tokens NextRange(const RecompressInput& input) const {
    if (input.prompt_tokens <= 0) return {};
    const int32_t end = EndOf(input.view);
    if (end == 0 && !(ReachesMinimum(input, plan_) && OutgrowsRows(plan_, input.view.tokens)))
      return {};
    const Tokens next = {end, input.prompt_tokens - plan_.lowrank.local};
    if (next.begin >= next.end) return {};
    return HasSurprisal(input.surprisal, {0, input.prompt_tokens}) ? next : Tokens{};
  }

  // The part that begins `next`: no longer than a part may be, and cut between spans.
  SpanRange RangeOf(const RecompressInput& input, Tokens next) const {
    const double threshold =
        AnchorThreshold(input.surprisal, input.prompt_tokens, plan_.lowrank.alpha);
    SpanRange range;
    range.first = next.begin == 0;
    range.tokens = next;
    range.spans = SpansIn(input.surprisal, next, threshold, plan_.lowrank.l_min);
    CutBetweenSpans(&range);
    // The first part names all anchors of the prompt, those in its window too.
    if (range.first) {
      range.anchors = AnchorsIn(input.surprisal, {0, input.prompt_tokens}, threshold);
    }
    return range;
  }

  void CutBetweenSpans(SpanRange* range) const {
    const int64_t wanted = range->tokens.begin + part_tokens_;
    if (wanted >= range->tokens.end) return;
    auto cut = static_cast<int32_t>(wanted);
    std::vector<Tokens>& spans = range->spans;
    auto across = std::ranges::lower_bound(spans, cut, {}, &Tokens::end);
    if (across != spans.end() && across->begin < cut && across->end > cut) {
      cut = across->begin > range->tokens.begin ? across->begin : across->end;
    }
    range->tokens.end = cut;
    std::erase_if(spans, [&](const Tokens& s) { return s.begin >= cut; });
  }

  Plan plan_;
  Geometry geometry_;
  std::shared_ptr<const SpanParameters> parameters_;
  int64_t part_tokens_;
};

}  // namespace

std::unique_ptr<Recompressor> NewSpanRecompressor(const Plan& plan, const Geometry& geometry,
                                                  std::shared_ptr<const SpanParameters> parameters,
                                                  int64_t part_bytes) {
  return std::make_unique<SpanRecompressor>(plan, geometry, std::move(parameters), part_bytes);
}

}  // namespace kvstrata
