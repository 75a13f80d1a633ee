// SPDX-License-Identifier: Apache-2.0
// Bytes of kPlanes and kLowerPlanes extents, and groups read back (docs/extents.md). Private to
// planes.
//
//     0    ExtentHeader
//     64   PlanesInfo
//     128  upper runs [layers][kv_heads][groups][PlanesFormat::upper_bytes()]
//          lower runs [layers][kv_heads][groups][PlanesFormat::lower_bytes()]
//     then 64 zero bytes
//
// Where lower runs lie on a tier of their own, or may come later than upper ones, a kPlanes has
// none, and a kLowerPlanes of the same tokens, with nothing else, follows it.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/codec/extent_bytes.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

inline constexpr uint64_t kPlanesInfoAt = 64, kPlanesFrontBytes = 128;

struct PlanesInfo {
  int32_t unit;  // tokens of a group
  int32_t keep;
  uint64_t upper, lower;  // where the runs begin; 0: they are not in this extent
  uint64_t reserved[5];
};
static_assert(sizeof(PlanesInfo) == 64);

// What of its groups an extent has.
struct PlanesPart {
  ExtentKind kind;
  bool upper, lower;

  Tier TierOf(const Plan& plan) const { return upper ? plan.tier : plan.planes.lower; }
};
// Those that hold groups of a plan together, in the order in which a sequence has them.
std::span<const PlanesPart> PlanesPartsOf(const Plan& plan);

// Whole groups. Runs lie where their extents do; the host may not be able to read them. `lower` is
// null while they are on their way (ExtentView::rest_due).
struct PlanesExtent {
  Run tokens;
  PlanesFormat format;
  int32_t groups = 0;
  const std::byte* upper = nullptr;
  const std::byte* lower = nullptr;

  // `head`: layer * kv_heads + kv_head. `group`: among those of the extent.
  int64_t UpperAt(int64_t head, int32_t group) const {
    return (head * groups + group) * format.upper_bytes();
  }
  int64_t LowerAt(int64_t head, int32_t group) const {
    return (head * groups + group) * format.lower_bytes();
  }
  const std::byte* Upper(int64_t head, int32_t group) const { return upper + UpperAt(head, group); }
  const std::byte* Lower(int64_t head, int32_t group) const { return lower + LowerAt(head, group); }
};
// The first of `extents`, with the one behind it where that has its lower runs; takes them off.
// REQUIRES: there is one.
Result<PlanesExtent> ReadPlanesExtent(std::span<const ExtentView>* extents,
                                      const Geometry& geometry);

// Places of an extent of so many groups.
PlanesInfo ReservePlanes(const Geometry& geometry, const PlanesFormat& format, int32_t groups,
                         const PlanesPart& part, ExtentWriter* writer);

}  // namespace kvstrata
