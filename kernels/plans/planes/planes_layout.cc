// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/planes/planes_layout.h"

namespace kvstrata {

Result<PlanesExtent> ReadPlanesExtent(const ExtentView& extent, const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                       ExtentReader::Open(extent, geometry, ExtentKind::kPlanes));
  const Run tokens = reader.tokens();
  const auto* const info = reader.Read<PlanesInfo>(kPlanesInfoAt, 1);
  if (info == nullptr) return DamagedExtent(tokens, "is too short for its description");
  PlanesExtent planes;
  planes.tokens = tokens;
  planes.format = {geometry.head_dim, info->unit, info->keep};
  if (!planes.format.IsValid()) {
    return DamagedExtent(tokens, "unit is " + std::to_string(info->unit) + ", keep " +
                                     std::to_string(info->keep) + ": there is no such group");
  }
  if (tokens.begin % info->unit != 0 || tokens.end % info->unit != 0) {
    return DamagedExtent(tokens, "holds no whole groups of " + std::to_string(info->unit));
  }
  planes.groups = (tokens.end - tokens.begin) / info->unit;
  const int64_t runs = int64_t{geometry.layers} * geometry.kv_heads * planes.groups;
  planes.upper = reader.Array<std::byte>(info->upper, runs * planes.format.upper_bytes());
  planes.lower = reader.Array<std::byte>(info->lower, runs * planes.format.lower_bytes());
  if (planes.upper == nullptr || planes.lower == nullptr) {
    return DamagedExtent(tokens, "planes lie outside of it");
  }
  return planes;
}

PlanesInfo ReservePlanes(const Geometry& geometry, const PlanesFormat& format, int32_t groups,
                         ExtentWriter* writer) {
  const int64_t runs = int64_t{geometry.layers} * geometry.kv_heads * groups;
  PlanesInfo info = {};
  info.unit = format.tokens;
  info.keep = format.keep;
  writer->Reserve(sizeof(PlanesInfo));
  info.upper = writer->Reserve(runs * format.upper_bytes());
  info.lower = writer->Reserve(runs * format.lower_bytes());
  return info;
}

}  // namespace kvstrata
