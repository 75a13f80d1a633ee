// SPDX-License-Identifier: Apache-2.0
// Extent: what a codec stores when it is not a raw page (docs/extents.md). A
// self-describing byte string with a fixed header; everything inside is addressed by offsets that a
// parser checks against the extent's size before it uses them, so that a damaged extent is an error
// and never an over-read.
//
// Kinds and who writes them:
// - kPackedSegment: codec packed: rotations, packed rows and block keys of a token range, all
// layers
// - kSpanSummary: codec lowrank: spans, coarse rows, routing (tier device)
// - kSpanFactors: codec lowrank: bases of the same range (tier: Plan::factors)
// - kRawRows: codec lowrank: the rows of the range that stay raw, compacted (tier device)
// - kPlanes: codec planes: whole groups of the range in planes, all layers (tier: Plan::tier)
// - kLowerPlanes: codec planes: lower runs of the kPlanes before it, which has none (tier:
// PlanesOptions::lower)
// An extent never changes once it is published; a new one replaces it.
//
// An extent of a GPU's pool lies where the host cannot read. Its description is a copy, in host
// memory, of its first bytes, as far as a parser reads them: header, scalars and entries, and the
// lists of spans, anchors and raw positions. Parsers read there and answer addresses in the extent
// itself, held against the extent's size as ever; what they would read beyond the description is
// EXTENT_INVALID. Bulk arrays (rows, rotations, means, factors, losses) are in no description.
// Threads: plain data; any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/sequence_view.h"

namespace kvstrata {

enum class ExtentKind : uint16_t {
  kPackedSegment = 1,
  kSpanSummary = 2,
  kSpanFactors = 3,
  kRawRows = 4,
  kPlanes = 5,
  kLowerPlanes = 6,
};

struct ExtentHeader {
  uint32_t magic;    // kExtentMagic
  uint16_t version;  // kExtentVersion
  uint16_t kind;     // ExtentKind
  int32_t begin;     // token positions [begin, end) that it is about
  int32_t end;
  int32_t layers, query_heads, kv_heads, head_dim;
  uint32_t dtype;     // DType of the model's rows
  uint32_t flags;     // flags of the kind, and kExtentUnhashed
  uint64_t bytes;     // the whole extent, this header included
  uint64_t checksum;  // XXH3-64 of the bytes after the header; or, unhashed, a random number
  uint64_t reserved;
};
static_assert(sizeof(ExtentHeader) == 64);

inline constexpr uint32_t kExtentMagic = 0x5845564B;  // "KVEX"
inline constexpr uint16_t kExtentVersion = 1;
// A flag of every kind: made by a GPU, where nobody hashed it. `checksum` tells one build from
// another all the same.
inline constexpr uint32_t kExtentUnhashed = uint32_t{1} << 31;
// Arrays inside an extent begin at multiples of this; its end has as many zero bytes of slack, so
// that vector loads at the last row stay inside.
inline constexpr int64_t kExtentAlign = 64;

// Where the host reads an extent, and how far.
inline const std::byte* ReadableData(const ExtentView& extent) {
  return extent.description == nullptr ? extent.data : extent.description;
}
inline int64_t ReadableBytes(const ExtentView& extent) {
  if (extent.description == nullptr) return extent.bytes;
  return std::min(extent.bytes, extent.description_bytes);
}

// What of an extent is enough to tell how long its description is.
inline constexpr int64_t kExtentFrontBytes = 256;

// Bytes of the description of an extent of `bytes` bytes that begins with `front`, its first
// min(bytes, kExtentFrontBytes). At most `bytes`, whatever `front` holds: a damaged extent is the
// parser's to refuse. Cost: constant.
int64_t DescriptionBytes(std::span<const std::byte> front, int64_t bytes);

// Whether the header is sound and of this geometry. DATA_LOSS EXTENT_INVALID names the field.
// Cost: reads the header alone.
Status CheckExtent(const ExtentView& extent, const Geometry& geometry, ExtentKind kind);

// Takes the next bytes of an extent, an empty piece among them.
using ExtentCopier = std::function<Status(std::span<const std::byte>)>;

// Hands all of `extent` to `copy`, in order, and says whether the payload is what was written: for
// bytes that come from disk or network (ADR 9). DATA_LOSS EXTENT_CHECKSUM, or what `copy` answered;
// what was copied counts only where the answer is OK. For an unhashed extent only the checksum of
// who stored it can tell. Cost: one pass beside the copies, since a piece is summed and copied
// while it is in a cache.
Status CopyVerified(std::span<const std::byte> extent, const ExtentCopier& copy);

// The kind of a header that CheckExtent has not seen yet; 0 when it is too short for one.
ExtentKind KindOf(const ExtentView& extent);

}  // namespace kvstrata
