// Copies from one device to another through memory of the host: right for any two, at less than
// half the speed of their links. A resource that knows a shorter way takes that.
#include <algorithm>
#include <vector>

#include "server/memory/memory_resource.h"

namespace kvstrata {
namespace {

constexpr uint64_t kStaged = uint64_t{16} << 20;  // at a time, but for a larger one

uint64_t SpanOf(const CopyShape& shape) {
  return shape.rows == 0 ? 0 : (shape.rows - 1) * shape.pitch + shape.width;
}

}  // namespace

Status MemoryResource::CopyFrom(MemoryResource& other, std::span<const MemoryCopy> copies) {
  for (size_t begin = 0, end = 0; begin < copies.size(); begin = end) {
    uint64_t bytes = 0;
    while (end < copies.size() && (end == begin || bytes + SpanOf(copies[end].shape) <= kStaged)) {
      bytes += SpanOf(copies[end++].shape);
    }
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::vector<MemoryCopy> out_of, into;
    std::byte* at = staged.get();
    for (const auto& [to, from, shape] : copies.subspan(begin, end - begin)) {
      out_of.push_back({at, from, shape});
      into.push_back({to, at, shape});
      at += SpanOf(shape);
    }
    KVS_RETURN_IF_ERROR(other.Copy(out_of));
    KVS_RETURN_IF_ERROR(Copy(into));
  }
  return OkStatus();
}

}  // namespace kvstrata
