// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_axes.h"

#include <algorithm>
#include <array>

#include "kernels/plan/built_plans.h"

namespace kvstrata {

namespace {

using enum SelectorKind;
using enum CodecKind;

constexpr std::string_view kSegmenterNames[] = {"none", "page", "hierarchy", "sentence",
                                                "span", "loss", "bits"};

#define KVS_PRESET_ROW(preset, Kind, name, built) \
  {#preset, k##Kind, #name, KVS_OF_##built(&k##Kind##Preset), "KVS_PLAN_" #built},
constexpr PresetRow kPresets[] = {{"full", kFull, "full", &kFullPreset, ""},
                                  KVS_PLANS(KVS_PRESET_ROW)};

#define KVS_CODEC_NAME(Kind, name, built) \
  {#name, KVS_OF_##built(&k##Kind##Table), "KVS_PLAN_" #built},
constexpr CodecNameRow kCodecs[] = {{"raw", &kNoOptions, ""}, KVS_CODECS(KVS_CODEC_NAME)};

template <typename Row, size_t kCount>
constexpr auto NamesOf(const Row (&rows)[kCount], std::string_view Row::*name) {
  std::array<std::string_view, kCount> names;
  std::ranges::transform(rows, names.begin(), name);
  return names;
}
constexpr auto kSelectorNames = NamesOf(kPresets, &PresetRow::selector_name);
constexpr auto kCodecNames = NamesOf(kCodecs, &CodecNameRow::name);

const PresetRow& RowOf(SelectorKind k) { return kPresets[static_cast<size_t>(k)]; }

// Why a selector and a codec never go together: it has a codec of its own, or the codec's rows are
// no selector's but its own, or the selector says.
std::string_view WhyNotOver(const Preset& preset, CodecKind codec) {
  const bool has_own = preset.codecs.front().codec != kRaw && !preset.why_no_other.empty();
  if (has_own) return preset.why_no_other;
  if (codec == kPlanes) return kFinePreset.why_no_other;
  if (codec == kLowRank) {
    return "what is stored are spans that are read whole, as one row or expanded, and only "
           "selectors 'zoom' and 'bucket' choose whole spans";
  }
  return preset.why_no_other.empty() ? "what it chooses is read from pages" : preset.why_no_other;
}

Status NotBuilt(const std::string& what, std::string_view option) {
  return Unimplemented("PLAN_UNIMPLEMENTED", what + " is not in this build (" +
                                                 std::string(option) +
                                                 "=OFF); use another plan, or a build that has it");
}

Result<const Combination*> Built(const std::string& selector, const Combination& c) {
  const CodecNameRow& codec = kCodecs[static_cast<size_t>(c.codec)];
  if (codec.options != nullptr) return &c;
  return NotBuilt(selector + " over codec '" + std::string(codec.name) + "'", codec.left_out);
}

}  // namespace

constinit const PlanAxis kSelectorAxis = {"selector", kSelectorNames};
constinit const PlanAxis kCodecAxis = {"codec", kCodecNames};
constinit const PlanAxis kSegmenterAxis = {"segmenter", kSegmenterNames};

std::span<const PresetRow> PresetRows() { return kPresets; }
std::span<const CodecNameRow> CodecNameRows() { return kCodecs; }

Result<const Combination*> Combine(const AxisChoice& choice) {
  const PresetRow& row = RowOf(choice.selector);
  const std::string selector = "selector '" + std::string(row.selector_name) + "'";
  if (row.preset == nullptr) return NotBuilt(selector, row.left_out);
  const Combination* of_selector = nullptr;  // the first whose codec fits, whatever its segmenter
  for (const Combination& c : row.preset->codecs) {
    if (choice.codec && *choice.codec != c.codec) continue;
    if (!choice.segmenter || *choice.segmenter == c.segmenter) return Built(selector, c);
    if (of_selector == nullptr) of_selector = &c;
  }
  if (of_selector == nullptr) {
    return InvalidArgument("PLAN_COMBINATION",
                           selector + " cannot work over codec '" +
                               std::string(NameOf(*choice.codec)) +
                               "': " + std::string(WhyNotOver(*row.preset, *choice.codec)));
  }
  return InvalidArgument("PLAN_COMBINATION", selector + " cannot work with segmenter '" +
                                                 std::string(NameOf(*choice.segmenter)) +
                                                 "': " + std::string(of_selector->because) +
                                                 "; leave 'segmenter' out");
}

Plan DefaultsOf(SelectorKind selector, const Combination& c) {
  const PresetRow& row = RowOf(selector);
  Plan plan;
  plan.selector = selector;
  plan.codec = c.codec;
  plan.name = row.name;
  plan.index.unit = row.preset->unit;
  return plan;
}

SegmenterKind Plan::segmenter() const {
  const std::span<const Combination> all = RowOf(selector).preset->codecs;
  const auto found = std::ranges::find(all, codec, &Combination::codec);
  KVS_CHECK(found != all.end());
  return found->segmenter;
}

std::string_view NameOf(SelectorKind k) { return kSelectorNames[static_cast<size_t>(k)]; }
std::string_view NameOf(CodecKind k) { return kCodecNames[static_cast<size_t>(k)]; }
std::string_view NameOf(SegmenterKind k) { return kSegmenterNames[static_cast<size_t>(k)]; }

}  // namespace kvstrata
