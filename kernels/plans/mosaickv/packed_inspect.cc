// SPDX-License-Identifier: Apache-2.0
// The arrays of tests/golden/README.md that begin with "mosaickv.", from what the extents hold.
#include <algorithm>
#include <string>

#include "kernels/codec/row_floats.h"
#include "kernels/pages/inspect_array.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/plans/mosaickv/packed.h"

namespace kvstrata {
namespace {

constexpr int32_t kShownRows = 48;

// Rows of the first extent that "rotated_rows" and "packed_rows" show.
int32_t ShownRows(const PackedStorage& packed) {
  return std::min(packed.segments().front().tokens.end, kShownRows);
}

Result<InspectArray> RotatedRowsOf(const SelectContext& context, const PackedStorage& packed) {
  const int32_t n = ShownRows(packed), dim = context.geometry->head_dim;
  const PagedRows keys = KeysOf(context.view.pages, context.layout, 0, 0);
  std::vector<float> x(size_t(n) * size_t(dim)), rotated(x.size());
  for (int32_t t = 0; t < n; ++t) {
    if (context.view.pages[t / context.layout.page_tokens] == nullptr) {
      return FailedPrecondition("RAW_ROWS_GONE",
                                "rotated_rows: the raw pages of the first segment are released; "
                                "a plan with keep_raw = \"host\" keeps them");
    }
    WidenRow(keys, t, x.data() + int64_t{t} * dim);
  }
  const RotateWork work{packed.head(0, 0, 0).r_k, dim, false, x.data(), dim, n, rotated.data()};
  OpsOf<PackedOps>(context.backend->packed).rotate(&work, 1, InlineExecutor());
  return ArrayOf(InspectArray::Type::kF32, {n, dim}, rotated);
}

InspectArray PackedRowsOf(const PackedStorage& packed) {
  const PackedRows& keys = packed.head(0, 0, 0).keys;
  const int64_t n = ShownRows(packed);
  const std::vector<std::byte> bytes(keys.data, keys.data + n * keys.stride);
  return ArrayOf(InspectArray::Type::kU8, {n, keys.stride}, bytes);
}

// Whether extent i of `segments` goes on with what the one before it began.
bool Continues(const std::vector<PackedStorage::Segment>& segments, size_t i) {
  return i > 0 && segments[i].final == segments[i - 1].final &&
         segments[i].plan_begin == segments[i - 1].plan_begin;
}

InspectArray SegmentsOf(const PackedStorage& packed) {
  const auto& segments = packed.segments();
  std::vector<int32_t> flat;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (Continues(segments, i)) {
      flat[flat.size() - 2] = segments[i].tokens.end;
      continue;
    }
    const Run tokens = segments[i].tokens;
    flat.insert(flat.end(), {tokens.begin, tokens.end, segments[i].final ? 1 : 0});
  }
  return ArrayOf(InspectArray::Type::kI32, flat);
}

InspectArray StrategiesOf(const PackedStorage& packed, const Geometry& geometry) {
  std::vector<int32_t> flat;
  int64_t count = 0;
  for (size_t i = 0; i < packed.segments().size(); ++i) {
    if (Continues(packed.segments(), i)) continue;
    ++count;
    for (int layer = 0; layer < geometry.layers; ++layer) {
      for (int h = 0; h < geometry.kv_heads; ++h) {
        const PackedHead& head = packed.head(static_cast<int>(i), layer, h);
        flat.insert(flat.end(), {head.keys.keep, head.keys.neighbours, head.block});
      }
    }
  }
  return ArrayOf(InspectArray::Type::kI32, {count, int64_t{geometry.layers} * geometry.kv_heads, 3},
                 flat);
}

}  // namespace

Result<InspectArray> InspectPacked(const SelectContext& context, std::string_view name) {
  const PackedStorage* const stored = PackedOf(context);
  if (stored == nullptr || stored->segments().empty()) {
    return FailedPrecondition("NOTHING_PACKED",
                              "array '" + std::string(name) +
                                  "': nothing is packed yet; a plan packs from min_tokens on");
  }
  const PackedStorage& packed = *stored;
  const int32_t dim = context.geometry->head_dim;
  if (name == "segments") return SegmentsOf(packed);
  if (name == "strategies") return StrategiesOf(packed, *context.geometry);
  if (name == "packed_rows") return PackedRowsOf(packed);
  if (name == "rotated_rows") return RotatedRowsOf(context, packed);
  const float* values = packed.head(0, 0, 0).eigenvalues;
  return ArrayOf(InspectArray::Type::kF32, {dim}, std::vector<float>(values, values + dim));
}

}  // namespace kvstrata
