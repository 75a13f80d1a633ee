// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/extent.h"

#include <cstring>
#include <string>

#include "base/checksum.h"

namespace kvstrata {
namespace {

Status BadField(std::string_view field, int64_t value, std::string_view allowed) {
  return {Code::kDataLoss, "EXTENT_INVALID",
          "extent: " + std::string(field) + " is " + std::to_string(value) + ", not " +
              std::string(allowed)};
}

Status Expect(std::string_view field, int64_t value, int64_t wanted) {
  return value == wanted ? OkStatus() : BadField(field, value, std::to_string(wanted));
}

Status CheckPlace(const ExtentView& extent) {
  constexpr int64_t kSmallest = sizeof(ExtentHeader) + kExtentAlign;
  if (extent.data == nullptr) return BadField("address", 0, "an address");
  // Elements of arrays are read in place; nothing wider than 8 bytes is.
  for (const std::byte* at : {extent.data, extent.description}) {
    const auto odd = reinterpret_cast<uintptr_t>(at) % 8;
    if (odd != 0) return BadField("address modulo 8", static_cast<int64_t>(odd), "0");
  }
  if (extent.bytes < kSmallest) {
    return BadField("size", extent.bytes, "at least " + std::to_string(kSmallest));
  }
  if (ReadableBytes(extent) < static_cast<int64_t>(sizeof(ExtentHeader))) {
    return BadField("description", extent.description_bytes, "at least 64 bytes");
  }
  return OkStatus();
}

Status CheckRange(const ExtentHeader& h, const ExtentView& extent) {
  if (h.begin < 0 || h.end <= h.begin) return BadField("end", h.end, "beyond begin");
  KVS_RETURN_IF_ERROR(Expect("begin", h.begin, extent.tokens.begin));
  KVS_RETURN_IF_ERROR(Expect("end", h.end, extent.tokens.end));
  if (h.bytes < sizeof(h) + kExtentAlign || h.bytes > static_cast<uint64_t>(extent.bytes)) {
    return BadField("bytes", static_cast<int64_t>(h.bytes),
                    "at most " + std::to_string(extent.bytes));
  }
  return OkStatus();
}

// The header, once its size is sound.
Result<ExtentHeader> HeaderIn(std::span<const std::byte> extent) {
  ExtentHeader h;
  if (extent.size() < sizeof(h)) {
    return BadField("size", static_cast<int64_t>(extent.size()), "at least 64");
  }
  std::memcpy(&h, extent.data(), sizeof(h));
  if (h.bytes < sizeof(h) || h.bytes > extent.size()) {
    return BadField("bytes", static_cast<int64_t>(h.bytes),
                    "at most " + std::to_string(extent.size()));
  }
  return h;
}

}  // namespace

Status CheckExtent(const ExtentView& extent, const Geometry& geometry, ExtentKind kind) {
  KVS_RETURN_IF_ERROR(CheckPlace(extent));
  ExtentHeader h;
  std::memcpy(&h, ReadableData(extent), sizeof(h));
  KVS_RETURN_IF_ERROR(Expect("magic", h.magic, kExtentMagic));
  KVS_RETURN_IF_ERROR(Expect("version", h.version, kExtentVersion));
  KVS_RETURN_IF_ERROR(Expect("kind", h.kind, static_cast<int64_t>(kind)));
  KVS_RETURN_IF_ERROR(Expect("layers", h.layers, geometry.layers));
  KVS_RETURN_IF_ERROR(Expect("query_heads", h.query_heads, geometry.query_heads));
  KVS_RETURN_IF_ERROR(Expect("kv_heads", h.kv_heads, geometry.kv_heads));
  KVS_RETURN_IF_ERROR(Expect("head_dim", h.head_dim, geometry.head_dim));
  KVS_RETURN_IF_ERROR(Expect("dtype", h.dtype, static_cast<int64_t>(geometry.dtype)));
  KVS_RETURN_IF_ERROR(Expect("reserved", static_cast<int64_t>(h.reserved), 0));
  return CheckRange(h, extent);
}

Status CopyVerified(std::span<const std::byte> extent, const ExtentCopier& copy) {
  KVS_ASSIGN_OR_RETURN(const ExtentHeader h, HeaderIn(extent));
  if ((h.flags & kExtentUnhashed) != 0) return copy(extent);
  Status copied = copy(extent.first(sizeof(h)));
  const auto piece = [&](std::span<const std::byte> bytes) {
    if (copied.ok()) copied = copy(bytes);
  };
  const uint64_t checksum = ShortChecksumOf(extent.subspan(sizeof(h), h.bytes - sizeof(h)), piece);
  piece(extent.subspan(h.bytes));
  KVS_RETURN_IF_ERROR(copied);
  if (checksum == h.checksum) return OkStatus();
  return {Code::kDataLoss, "EXTENT_CHECKSUM",
          "extent of tokens " + std::to_string(h.begin) + " to " + std::to_string(h.end) +
              ": the bytes are not those that were written"};
}

ExtentKind KindOf(const ExtentView& extent) {
  ExtentHeader h;
  const std::byte* data = ReadableData(extent);
  if (data == nullptr || ReadableBytes(extent) < static_cast<int64_t>(sizeof(h))) return {};
  std::memcpy(&h, data, sizeof(h));
  return static_cast<ExtentKind>(h.kind);
}

}  // namespace kvstrata
