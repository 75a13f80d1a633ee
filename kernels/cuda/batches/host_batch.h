// SPDX-License-Identifier: Apache-2.0
// Batches (batch.h, device_rows.h) whose addresses are of host memory, as refs and tests of GPU ops
// read them. Nothing here is for device addresses.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/device_rows.h"
#include "kernels/pages/page_view.h"

namespace kvstrata::cuda {

// Row r of a head of one sequence; `head` in bytes, so that it may span layers.
inline std::byte* RowAt(const DeviceRows& rows, int sequence, int64_t head, int32_t r) {
  const uint64_t page = rows.pages[int64_t{sequence} * rows.page_stride + r / rows.page_rows];
  return reinterpret_cast<std::byte*>(page) + rows.offset + head +
         r % rows.page_rows * rows.row_stride;
}

// Keys and values of one sequence of a layer. `hot` is not looked at.
class HostPages {
 public:
  HostPages(const PagedLayer& layer, int sequence) : layer_(layer) {
    const uint64_t* const own = layer.pages + int64_t{sequence} * layer.page_stride;
    for (int32_t i = 0; i < layer.page_stride; ++i) {
      pages_.push_back(reinterpret_cast<std::byte*>(own[i]));
    }
  }
  // They live as long as this object.
  PagedRows Keys(int head) const { return Rows(layer_.key_offset, head); }
  PagedRows Values(int head) const { return Rows(layer_.value_offset, head); }

 private:
  PagedRows Rows(int64_t offset, int head) const {
    return {pages_.data(),      offset + head * layer_.head_stride,
            layer_.slot_stride, layer_.page_tokens,
            layer_.head_dim,    layer_.dtype};
  }

  const PagedLayer layer_;
  std::vector<std::byte*> pages_;
};

// Positions that a KV head of a sequence of `tokens` attends: ascending, disjoint, not empty.
inline std::vector<Run> AttendedRuns(const DeviceSelection& s, int sequence, int head,
                                     int32_t tokens) {
  std::vector<Run> runs;
  const auto add = [&](int32_t begin, int32_t end) {
    end = std::min(end, tokens);
    if (begin >= end) return;
    if (runs.empty() || runs.back().end != begin) runs.push_back({begin, begin});
    runs.back().end = end;
  };
  const int b = s.shared ? 0 : sequence;
  if (s.sink_end != nullptr) add(0, s.sink_end[b]);
  if (s.unit_tokens > 0) {
    const int64_t list = int64_t{b} * s.groups + (s.groups == 1 ? 0 : head);
    const int32_t* const units = s.lists == nullptr
                                     ? s.units + list * s.list_stride
                                     : reinterpret_cast<const int32_t*>(s.lists[list]);
    for (int32_t i = 0; i < s.counts[list]; ++i) {
      add(units[i] * s.unit_tokens, (units[i] + 1) * s.unit_tokens);
    }
  }
  add(s.recent_begin == nullptr ? 0 : s.recent_begin[b], tokens);
  return runs;
}

}  // namespace kvstrata::cuda
