// SPDX-License-Identifier: Apache-2.0
// Choices on a plan's axes (docs/plans.md, "Axes"), and their names.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/plans/plan_list.h"

namespace kvstrata {

enum class SegmenterKind : uint8_t { kNone, kPage, kHierarchy, kSentence, kSpan, kLoss, kBits };
// kFull, kWindow, kMinMax, ...; kRaw, kLowRank, ...
#define KVS_PLAN_KIND(preset, Kind, name, built) k##Kind,
#define KVS_CODEC_KIND(Kind, name, built) k##Kind,
enum class SelectorKind : uint8_t { kFull, KVS_PLANS(KVS_PLAN_KIND) };
enum class CodecKind : uint8_t { kRaw, KVS_CODECS(KVS_CODEC_KIND) };

std::string_view NameOf(SegmenterKind k);
std::string_view NameOf(SelectorKind k);
std::string_view NameOf(CodecKind k);

}  // namespace kvstrata
