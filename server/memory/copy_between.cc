// SPDX-License-Identifier: Apache-2.0
// Between two devices: out of one into memory of the host, from there into the other, by the copies
// that each knows. Right for any two; what a link between them could gain is not tried.
#include <vector>

#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

constexpr uint64_t kStaged = uint64_t{16} << 20;  // at a time, but for a larger one

uint64_t SpanOf(const CopyShape& shape) {
  return shape.rows == 0 ? 0 : (shape.rows - 1) * shape.pitch + shape.width;
}

}  // namespace

Status CopyBetween(MemoryResource& from, MemoryResource& to, std::span<const MemoryCopy> copies) {
  for (size_t begin = 0, end = 0; begin < copies.size(); begin = end) {
    uint64_t bytes = 0;
    while (end < copies.size() && (end == begin || bytes + SpanOf(copies[end].shape) <= kStaged)) {
      bytes += SpanOf(copies[end++].shape);
    }
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::vector<MemoryCopy> out_of, into;
    std::byte* at = staged.get();
    for (const MemoryCopy& copy : copies.subspan(begin, end - begin)) {
      out_of.push_back({at, copy.from, copy.shape});
      into.push_back({copy.to, at, copy.shape});
      at += SpanOf(copy.shape);
    }
    KVS_RETURN_IF_ERROR(from.Copy(out_of));
    KVS_RETURN_IF_ERROR(to.Copy(into));
  }
  return OkStatus();
}

}  // namespace kvstrata
