// SPDX-License-Identifier: Apache-2.0
// Choices on a plan's axes (docs/plans.md, "Axes"), and their names.
#ifndef KVSTRATA_KERNELS_PLAN_PLAN_KINDS_H_
#define KVSTRATA_KERNELS_PLAN_PLAN_KINDS_H_

#include <cstdint>
#include <string_view>

#include "kernels/pages/tier.h"

namespace kvstrata {

enum class SegmenterKind : uint8_t { kNone, kPage, kHierarchy, kSentence, kSpan, kLoss, kBits };
enum class SelectorKind : uint8_t {
  kFull,
  kWindow,
  kMinMax,
  kCascade,
  kVote,
  kBucket,
  kZoom,
  kBlock,
  kBits,
  kFine
};
enum class CodecKind : uint8_t { kRaw, kLowRank, kPacked, kPlanes };

std::string_view NameOf(SegmenterKind k);
std::string_view NameOf(SelectorKind k);
std::string_view NameOf(CodecKind k);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_PLAN_KINDS_H_
