// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_axes.h"

#include <algorithm>
#include <array>

#include "kernels/plan/built_plans.h"

namespace kvstrata {

// Each in its plan's folder.
extern const OptionTable kWindowTable, kMinMaxTable, kCascadeTable, kVoteTable, kBucketTable,
    kZoomTable, kBlockTable, kBitsTable, kFineTable;

namespace {

using enum SelectorKind;
using enum CodecKind;

constexpr std::string_view kCodecNames[] = {"raw", "lowrank", "packed", "planes"};
constexpr std::string_view kSegmenterNames[] = {"none", "page", "hierarchy", "sentence",
                                                "span", "loss", "bits"};

constexpr PresetRow kPresets[] = {
    {"full", kFull, "full", &kNoOptions,
     "every token, every step: the baseline that the others are measured against"},
    {"window", kWindow, "window", &kWindowTable,
     "StreamingLLM: the first 4 and the last 2044 tokens"},
    {"quest", kMinMax, "minmax", &kMinMaxTable,
     "Quest: per layer and KV head, the pages with the largest possible logit, 2048 tokens"},
    {"chess", kCascade, "cascade", &kCascadeTable,
     "CHESS: one page list for all layers and heads, chosen anew when the model is uncertain"},
    {"tokenselect", kVote, "vote", &kVoteTable,
     "TokenSelect: per layer, the 2048 tokens that most heads attend to, kept while queries stay "
     "alike"},
    {"sentencekv", kBucket, "bucket", &kBucketTable,
     "SentenceKV: per layer and KV head, the important tokens of the sentences nearest to the one "
     "being written"},
    {"sekv", kZoom, "zoom", KVS_OF_SEKV(&kZoomTable),
     "SeKV: per layer and head, spans as one row each, expanded from low-rank factors where a "
     "query asks for it"},
    {"mosaickv", kBlock, "block", KVS_OF_MOSAICKV(&kBlockTable),
     "MosaicKV: keys and values packed to about a third, a tenth of the blocks attended"},
    {"strata", kBits, "bits", &kBitsTable,
     "kvstrata's own: per layer and KV head, the 2048 tokens with the largest weights by keys in "
     "two bits"},
    {"planes", kFine, "fine", &kFineTable,
     "kvstrata's own: keys and values in nested bits, everything attended by two, what matters by "
     "eight"},
};

constexpr auto kSelectorNames = [] {
  std::array<std::string_view, std::size(kPresets)> names;
  std::ranges::transform(kPresets, names.begin(), &PresetRow::selector_name);
  return names;
}();

constexpr std::string_view kNoSummaries =
    "it reads no summaries, so an index would cost memory and serve nothing";
constexpr std::string_view kExtremes =
    "it ranks pages by the element-wise minimum and maximum of their keys, which only segmenter "
    "'page' keeps";
constexpr std::string_view kLevels =
    "it cascades over grids, chunks and pages, whose means only segmenter 'hierarchy' keeps";
constexpr std::string_view kQuantised =
    "it scores tokens by their keys in few bits, which only segmenter 'bits' keeps";
constexpr std::string_view kSpansOnly = "codec 'lowrank' stores the spans of segmenter 'span'";

// Each selector's preset comes first among its combinations.
constexpr Combination kCombinations[] = {
    {kFull, kRaw, SegmenterKind::kNone, kNoSummaries},
    {kFull, kPacked, SegmenterKind::kNone, kNoSummaries},
    {kWindow, kRaw, SegmenterKind::kNone, kNoSummaries},
    {kWindow, kPacked, SegmenterKind::kNone, kNoSummaries},
    {kMinMax, kRaw, SegmenterKind::kPage, kExtremes},
    {kMinMax, kPacked, SegmenterKind::kPage, kExtremes},
    {kCascade, kRaw, SegmenterKind::kHierarchy, kLevels},
    {kCascade, kPacked, SegmenterKind::kHierarchy, kLevels},
    {kVote, kRaw, SegmenterKind::kNone, kNoSummaries},
    {kVote, kPacked, SegmenterKind::kNone, kNoSummaries},
    {kBucket, kRaw, SegmenterKind::kSentence,
     "its buckets over codec 'raw' are sentences, which only segmenter 'sentence' finds"},
    {kBucket, kLowRank, SegmenterKind::kSpan, kSpansOnly},
    {kZoom, kLowRank, SegmenterKind::kSpan, kSpansOnly},
    {kBlock, kPacked, SegmenterKind::kLoss,
     "its blocks over codec 'packed' are those of the packed segments, which segmenter 'loss' "
     "cuts"},
    {kBlock, kRaw, SegmenterKind::kPage,
     "its blocks over codec 'raw' are pages, whose means only segmenter 'page' keeps"},
    {kBits, kRaw, SegmenterKind::kBits, kQuantised},
    {kBits, kPacked, SegmenterKind::kBits, kQuantised},
    {kFine, kPlanes, SegmenterKind::kNone, kNoSummaries},
};

// Why a selector and a codec never go together.
std::string_view WhyNotOver(SelectorKind selector, CodecKind codec) {
  if (selector == kZoom) {
    return "it chooses at which resolution a span is read, and only codec 'lowrank' stores spans "
           "at two";
  }
  if (selector == kFine || codec == kPlanes) {
    return "which rows are read by all of their planes is found among rows that are attended by "
           "one, and only selector 'fine' over codec 'planes' does so";
  }
  if (codec == kLowRank) {
    return "what is stored are spans that are read whole, as one row or expanded, and only "
           "selectors 'zoom' and 'bucket' choose whole spans";
  }
  return "a bucket is the kept tokens of a sentence, which do not fall on packed blocks; its "
         "codecs "
         "are 'raw' and 'lowrank'";
}

Result<const Combination*> Built(const Combination& c) {
  if (IsBuilt(c.selector, c.codec)) return &c;
  const bool sekv = c.selector == kZoom || c.codec == kLowRank;
  return Unimplemented("PLAN_UNIMPLEMENTED", "selector '" + std::string(NameOf(c.selector)) +
                                                 "' over codec '" + std::string(NameOf(c.codec)) +
                                                 "' is not in this build (KVS_PLAN_" +
                                                 (sekv ? "SEKV" : "MOSAICKV") +
                                                 "=OFF); use another plan, or a build that has it");
}

}  // namespace

constinit const PlanAxis kSelectorAxis = {"selector", kSelectorNames};
constinit const PlanAxis kCodecAxis = {"codec", kCodecNames};
constinit const PlanAxis kSegmenterAxis = {"segmenter", kSegmenterNames};

std::span<const PresetRow> PresetRows() { return kPresets; }

Result<const Combination*> Combine(const AxisChoice& choice) {
  const Combination* of_selector = nullptr;  // the first whose codec fits, whatever its segmenter
  for (const Combination& c : kCombinations) {
    if (c.selector != choice.selector || (choice.codec && *choice.codec != c.codec)) continue;
    if (!choice.segmenter || *choice.segmenter == c.segmenter) return Built(c);
    if (of_selector == nullptr) of_selector = &c;
  }
  const std::string selector(NameOf(choice.selector));
  if (of_selector == nullptr) {
    return InvalidArgument("PLAN_COMBINATION",
                           "selector '" + selector + "' cannot work over codec '" +
                               std::string(NameOf(*choice.codec)) +
                               "': " + std::string(WhyNotOver(choice.selector, *choice.codec)));
  }
  return InvalidArgument("PLAN_COMBINATION",
                         "selector '" + selector + "' cannot work with segmenter '" +
                             std::string(NameOf(*choice.segmenter)) +
                             "': " + std::string(of_selector->because) + "; leave 'segmenter' out");
}

Plan DefaultsOf(const Combination& c) {
  Plan plan;
  plan.selector = c.selector;
  plan.codec = c.codec;
  plan.name = kPresets[static_cast<size_t>(c.selector)].name;
  if (c.selector == kCascade) plan.index.unit = 32;
  if (c.selector == kBits) plan.index.unit = 64;
  return plan;
}

SegmenterKind Plan::segmenter() const {
  const auto fits = [this](const Combination& c) {
    return c.selector == selector && c.codec == codec;
  };
  const auto found = std::ranges::find_if(kCombinations, fits);
  KVS_CHECK(found != std::end(kCombinations));
  return found->segmenter;
}

std::string_view NameOf(SelectorKind k) { return kSelectorNames[static_cast<size_t>(k)]; }
std::string_view NameOf(CodecKind k) { return kCodecNames[static_cast<size_t>(k)]; }
std::string_view NameOf(SegmenterKind k) { return kSegmenterNames[static_cast<size_t>(k)]; }

}  // namespace kvstrata
