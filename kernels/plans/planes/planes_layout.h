// SPDX-License-Identifier: Apache-2.0
// Bytes of a kPlanes extent, and one such extent read back (docs/extents.md). Private to planes.
//
//     0    ExtentHeader
//     64   PlanesInfo
//     128  upper runs [layers][kv_heads][groups][PlanesFormat::upper_bytes()]
//          lower runs [layers][kv_heads][groups][PlanesFormat::lower_bytes()]
//     then 64 zero bytes
#ifndef KVSTRATA_KERNELS_PLANS_PLANES_PLANES_LAYOUT_H_
#define KVSTRATA_KERNELS_PLANS_PLANES_PLANES_LAYOUT_H_

#include <cstdint>

#include "kernels/codec/extent_bytes.h"
#include "kernels/ops/pack_planes/planes_format.h"

namespace kvstrata {

inline constexpr uint64_t kPlanesInfoAt = 64, kPlanesFrontBytes = 128;

struct PlanesInfo {
  int32_t unit;  // tokens of a group
  int32_t keep;
  uint64_t upper, lower;  // where the runs begin
  uint64_t reserved[5];
};
static_assert(sizeof(PlanesInfo) == 64);

// Whole groups. Runs lie where the extent does; the host may not be able to read them.
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
Result<PlanesExtent> ReadPlanesExtent(const ExtentView& extent, const Geometry& geometry);

// Places of an extent of so many groups.
PlanesInfo ReservePlanes(const Geometry& geometry, const PlanesFormat& format, int32_t groups,
                         ExtentWriter* writer);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLANS_PLANES_PLANES_LAYOUT_H_
