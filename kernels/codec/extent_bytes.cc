// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/extent_bytes.h"

#include <string>
#include <utility>

#include "base/checksum.h"

namespace kvstrata {

ExtentHeader HeaderOf(ExtentKind kind, const Geometry& geometry, Run tokens, uint32_t flags,
                      int64_t bytes) {
  ExtentHeader h = {};
  h.magic = kExtentMagic;
  h.version = kExtentVersion;
  h.kind = static_cast<uint16_t>(kind);
  h.begin = tokens.begin;
  h.end = tokens.end;
  h.layers = geometry.layers;
  h.query_heads = geometry.query_heads;
  h.kv_heads = geometry.kv_heads;
  h.head_dim = geometry.head_dim;
  h.dtype = static_cast<uint32_t>(geometry.dtype);
  h.flags = flags;
  h.bytes = static_cast<uint64_t>(bytes);
  return h;
}

int64_t ExtentFront::EndOf(uint64_t offset, int64_t count, size_t element) const {
  const auto limit = static_cast<uint64_t>(bytes_);
  if (count < 0 || offset > limit || static_cast<uint64_t>(count) > limit / element) return bytes_;
  return static_cast<int64_t>(offset + static_cast<uint64_t>(count) * element);
}

std::vector<std::byte> ExtentWriter::Finish(ExtentKind kind, const Geometry& geometry, Run tokens,
                                            uint32_t flags) {
  ExtentHeader h = HeaderOf(kind, geometry, tokens, flags, static_cast<int64_t>(data_.size()));
  h.checksum = ShortChecksumOf(std::span(data_).subspan(sizeof(h)));
  std::memcpy(data_.data(), &h, sizeof(h));
  end_ = sizeof(ExtentHeader);
  return std::exchange(data_, {});
}

Result<ExtentReader> ExtentReader::Open(const ExtentView& extent, const Geometry& geometry,
                                        ExtentKind kind) {
  KVS_RETURN_IF_ERROR(CheckExtent(extent, geometry, kind));
  ExtentReader reader;
  reader.data_ = extent.data;
  reader.readable_ = ReadableData(extent);
  reader.readable_bytes_ = static_cast<uint64_t>(ReadableBytes(extent));
  std::memcpy(&reader.header_, reader.readable_, sizeof(reader.header_));
  return reader;
}

Status DamagedExtent(Run tokens, std::string_view what) {
  return {Code::kDataLoss, "EXTENT_INVALID",
          "extent of tokens " + std::to_string(tokens.begin) + " to " + std::to_string(tokens.end) +
              ": " + std::string(what)};
}

}  // namespace kvstrata
