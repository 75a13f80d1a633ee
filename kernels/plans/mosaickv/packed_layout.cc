// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/packed_layout.h"

namespace kvstrata {
namespace {

// The plan's part of the info against the extent's range.
bool InfoFits(const PackedStub& s) {
  const PackedInfo& i = s.info;
  if (i.plan_begin < 0 || i.plan_begin > s.tokens.begin) return false;
  if (s.final) return i.plan_end >= s.tokens.end && i.buffer == 0;
  // Temporary: whole flushes, with the rotations of a segment before it.
  return i.plan_begin < s.tokens.begin && i.buffer > 0 &&
         (s.tokens.end - s.tokens.begin) % i.buffer == 0;
}

bool StrategyFits(const PackedEntry& e, const PackedExtent& extent, int32_t dim) {
  const int32_t channels = extent.truncated ? dim - dim / 4 : dim;
  if (e.neighbours != 1 && e.neighbours != 2 && e.neighbours != 4) return false;
  if (e.keep < e.neighbours || e.keep > channels || e.keep % e.neighbours != 0) return false;
  // Blocks of temporary extents join without a seam.
  return e.block > 0 && e.reserved == 0 && (extent.final || extent.info.buffer % e.block == 0);
}

PackedRows RowsAt(const ExtentReader& reader, uint64_t offset, int64_t count,
                  const PackedRows& format) {
  PackedRows rows = format;
  rows.data = reader.Array<std::byte>(offset, count * format.stride);
  return rows;
}

bool ReadRotations(const ExtentReader& reader, const PackedEntry& e, int32_t dim, PackedHead* out) {
  const int64_t square = int64_t{dim} * dim;
  out->r_k = reader.Array<float>(e.r_k, square);
  out->r_v = reader.Array<float>(e.r_v, square);
  out->eigenvalues = reader.Array<float>(e.eigenvalues, dim);
  return out->r_k != nullptr && out->r_v != nullptr && out->eigenvalues != nullptr;
}

bool ReadHead(const ExtentReader& reader, const PackedEntry& e, const PackedExtent& extent,
              PackedHead* out) {
  const int32_t dim = reader.header().head_dim;
  if (!StrategyFits(e, extent, dim)) return false;
  const PackedRows format = PackedFormat(dim, e.keep, e.neighbours, extent.truncated);
  const int64_t blocks = (int64_t{extent.rows()} + e.block - 1) / e.block;
  out->keys = RowsAt(reader, e.keys, extent.rows(), format);
  out->values = RowsAt(reader, e.values, extent.rows(), format);
  out->blocks = RowsAt(reader, e.blocks, blocks, format);
  out->block = e.block;
  if (out->keys.data == nullptr || out->values.data == nullptr || out->blocks.data == nullptr) {
    return false;
  }
  return !extent.has_rotations() || ReadRotations(reader, e, dim, out);
}

Result<PackedStub> ReadStub(const ExtentReader& reader) {
  const uint32_t flags = reader.header().flags;
  const auto* info = reader.Read<PackedInfo>(kPackedInfoAt, 1);
  if (info == nullptr) return DamagedExtent(reader.tokens(), "too short");
  const PackedStub stub{reader.tokens(), (flags & kPackedFinal) != 0, *info};
  if ((flags & ~(kPackedFinal | kPackedTruncated | kExtentUnhashed)) != 0 || !InfoFits(stub)) {
    return DamagedExtent(reader.tokens(), "its flags or its plan's range do not fit it");
  }
  return stub;
}

}  // namespace

Result<PackedStub> ReadPackedStub(const ExtentView& view, const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                       ExtentReader::Open(view, geometry, ExtentKind::kPackedSegment));
  return ReadStub(reader);
}

Result<PackedExtent> ReadPackedExtent(const ExtentView& view, const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                       ExtentReader::Open(view, geometry, ExtentKind::kPackedSegment));
  KVS_ASSIGN_OR_RETURN(const PackedStub stub, ReadStub(reader));
  PackedExtent extent;
  extent.tokens = stub.tokens;
  extent.final = stub.final;
  extent.info = stub.info;
  extent.truncated = (reader.header().flags & kPackedTruncated) != 0;
  extent.bytes = reader.bytes();
  const int64_t count = int64_t{geometry.layers} * geometry.kv_heads;
  const auto* entries = reader.Read<PackedEntry>(kPackedEntriesAt, count);
  if (entries == nullptr) return DamagedExtent(extent.tokens, "too short for its heads");
  extent.heads.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < extent.heads.size(); ++i) {
    if (!ReadHead(reader, entries[i], extent, &extent.heads[i])) {
      return DamagedExtent(extent.tokens, "head " + std::to_string(i) +
                                              " has an impossible strategy or lies outside");
    }
  }
  if (extent.final) return extent;
  extent.flushes = reader.Read<double>(stub.info.flushes, extent.rows() / stub.info.buffer);
  if (extent.flushes == nullptr) return DamagedExtent(extent.tokens, "its losses lie outside");
  return extent;
}

}  // namespace kvstrata
