// SPDX-License-Identifier: Apache-2.0
// How much of an extent its description holds (extent.h): up to the end of the last array that a
// parser reads. Writers put those before the bulk arrays.
#include <algorithm>
#include <cstring>

#include "kernels/plans/mosaickv/packed_layout.h"
#include "kernels/plans/sekv/lowrank_layout.h"

namespace kvstrata {
namespace {

// The struct at `at`; zeros where `front` is too short.
template <typename T>
T StructAt(std::span<const std::byte> front, uint64_t at) {
  T value = {};
  if (front.size() >= at + sizeof(T)) std::memcpy(&value, front.data() + at, sizeof(T));
  return value;
}

// Past the extent's end for numbers that no extent holds.
int64_t EndOf(uint64_t offset, int64_t count, size_t element, int64_t bytes) {
  const auto limit = static_cast<uint64_t>(bytes);
  if (count < 0 || offset > limit || static_cast<uint64_t>(count) > limit / element) return bytes;
  return static_cast<int64_t>(offset + static_cast<uint64_t>(count) * element);
}

int64_t EndOfLists(std::span<const std::byte> front, const ExtentHeader& h, int64_t bytes) {
  const int64_t heads = int64_t{h.layers} * h.kv_heads;
  switch (static_cast<ExtentKind>(h.kind)) {
    case ExtentKind::kPackedSegment: {
      const auto info = StructAt<PackedInfo>(front, kPackedInfoAt);
      const int64_t entries = EndOf(kPackedEntriesAt, heads, sizeof(PackedEntry), bytes);
      if (info.buffer <= 0) return entries;
      const int32_t flushes = (h.end - h.begin) / info.buffer;
      return std::max(entries, EndOf(info.flushes, flushes, sizeof(double), bytes));
    }
    case ExtentKind::kSpanSummary: {
      const auto info = StructAt<SpanInfo>(front, kSpanInfoAt);
      return std::max(EndOf(info.spans, info.span_count, 2 * sizeof(int32_t), bytes),
                      EndOf(info.anchors, info.anchor_count, sizeof(int32_t), bytes));
    }
    case ExtentKind::kSpanFactors: {
      const auto info = StructAt<FactorsInfo>(front, kSpanInfoAt);
      int64_t entries = 0;
      if (__builtin_mul_overflow(heads, int64_t{info.span_count}, &entries)) return bytes;
      return EndOf(info.entries, entries, sizeof(FactorEntry), bytes);
    }
    case ExtentKind::kRawRows: {
      const auto info = StructAt<RawRowsInfo>(front, kSpanInfoAt);
      return EndOf(info.positions, info.raw_count, sizeof(int32_t), bytes);
    }
    case ExtentKind::kPlanes:
      return 0;  // its numbers are in the front
  }
  return 0;
}

}  // namespace

int64_t DescriptionBytes(std::span<const std::byte> front, int64_t bytes) {
  const auto h = StructAt<ExtentHeader>(front, 0);
  return std::min(bytes, std::max(kExtentFrontBytes, EndOfLists(front, h, bytes)));
}

}  // namespace kvstrata
