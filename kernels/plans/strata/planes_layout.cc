// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/planes_layout.h"

namespace kvstrata {
namespace {

constexpr PlanesPart kWhole[] = {{ExtentKind::kPlanes, true, true}};
constexpr PlanesPart kSplit[] = {{ExtentKind::kPlanes, true, false},
                                 {ExtentKind::kLowerPlanes, false, true}};

Result<PlanesInfo> ReadInfo(const ExtentReader& reader) {
  const auto* const info = reader.Read<PlanesInfo>(kPlanesInfoAt, 1);
  if (info == nullptr) return DamagedExtent(reader.tokens(), "is too short for its description");
  return *info;
}

// Runs of the lower planes of `planes`.
Result<const std::byte*> ReadLower(const ExtentReader& reader, const PlanesInfo& info,
                                   const PlanesExtent& planes, int64_t heads) {
  const auto* const lower =
      reader.Array<std::byte>(info.lower, heads * planes.groups * planes.format.lower_bytes());
  if (lower == nullptr) return DamagedExtent(reader.tokens(), "planes lie outside of it");
  return lower;
}

// From the extent behind one that has upper runs alone.
Result<const std::byte*> ReadLowerExtent(std::span<const ExtentView> behind,
                                         const Geometry& geometry, const PlanesExtent& planes,
                                         int64_t heads) {
  if (behind.empty()) return DamagedExtent(planes.tokens, "has no lower planes, nor one behind it");
  KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                       ExtentReader::Open(behind.front(), geometry, ExtentKind::kLowerPlanes));
  KVS_ASSIGN_OR_RETURN(const PlanesInfo info, ReadInfo(reader));
  const PlanesFormat format = {geometry.head_dim, info.unit, info.keep};
  if (reader.tokens() != planes.tokens || format != planes.format) {
    return DamagedExtent(reader.tokens(),
                         "has lower planes of other groups than the one before it");
  }
  return ReadLower(reader, info, planes, heads);
}

}  // namespace

std::span<const PlanesPart> PlanesPartsOf(const Plan& plan) {
  if (plan.planes.lower == Tier::kHost || plan.planes.open_on_upper) return kSplit;
  return kWhole;
}

Result<PlanesExtent> ReadPlanesExtent(std::span<const ExtentView>* extents,
                                      const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                       ExtentReader::Open(extents->front(), geometry, ExtentKind::kPlanes));
  const bool rest_due = extents->front().rest_due;
  *extents = extents->subspan(1);
  const Run tokens = reader.tokens();
  KVS_ASSIGN_OR_RETURN(const PlanesInfo info, ReadInfo(reader));
  PlanesExtent planes;
  planes.tokens = tokens;
  planes.format = {geometry.head_dim, info.unit, info.keep};
  if (!planes.format.IsValid()) {
    return DamagedExtent(tokens, "unit is " + std::to_string(info.unit) + ", keep " +
                                     std::to_string(info.keep) + ": there is no such group");
  }
  if (tokens.begin % info.unit != 0 || tokens.end % info.unit != 0) {
    return DamagedExtent(tokens, "holds no whole groups of " + std::to_string(info.unit));
  }
  planes.groups = (tokens.end - tokens.begin) / info.unit;
  const int64_t heads = int64_t{geometry.layers} * geometry.kv_heads;
  planes.upper =
      reader.Array<std::byte>(info.upper, heads * planes.groups * planes.format.upper_bytes());
  if (planes.upper == nullptr) return DamagedExtent(tokens, "planes lie outside of it");
  if (info.lower != 0) {
    KVS_ASSIGN_OR_RETURN(planes.lower, ReadLower(reader, info, planes, heads));
    return planes;
  }
  if (rest_due) return planes;
  KVS_ASSIGN_OR_RETURN(planes.lower, ReadLowerExtent(*extents, geometry, planes, heads));
  *extents = extents->subspan(1);
  return planes;
}

PlanesInfo ReservePlanes(const Geometry& geometry, const PlanesFormat& format, int32_t groups,
                         const PlanesPart& part, ExtentWriter* writer) {
  const int64_t runs = int64_t{geometry.layers} * geometry.kv_heads * groups;
  PlanesInfo info = {};
  info.unit = format.tokens;
  info.keep = format.keep;
  writer->Reserve(sizeof(PlanesInfo));
  if (part.upper) info.upper = writer->Reserve(runs * format.upper_bytes());
  if (part.lower) info.lower = writer->Reserve(runs * format.lower_bytes());
  return info;
}

}  // namespace kvstrata
