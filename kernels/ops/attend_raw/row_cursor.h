// SPDX-License-Identifier: Apache-2.0
// RowCursor: the rows of an attend_raw work item, a tile at a time.
//
// A tile lists where its keys and values lie, so that the kernels know nothing of runs and pages.
// Rows that no query sees (positions beyond the last query token) are left out.
// Ownership: views of the work item. Threads: one. Cost: a few instructions a row, no allocation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/ops/attend_raw/attend_raw.h"

namespace kvstrata {

inline constexpr int kTileRowsMax = 96;

struct RowTile {
  int count = 0;
  const std::byte* k[kTileRowsMax];
  const std::byte* v[kTileRowsMax];
  int32_t position[kTileRowsMax];  // ascending

  // Rows visible to a query token at `at`; they are the first ones.
  int Visible(int32_t at) const {
    if (count == 0 || position[count - 1] <= at) return count;
    return static_cast<int>(std::upper_bound(position, position + count, at) - position);
  }
};

class RowCursor {
 public:
  explicit RowCursor(const AttendWork& work)
      : work_(work), last_(work.position + work.queries - 1) {
    if (work.run_count > 0) next_ = work.runs[0].begin;
  }

  // Fills `tile` with the next rows, at most `rows_max`; an empty tile is the end.
  void Next(int rows_max, RowTile* tile) {
    tile->count = 0;
    while (tile->count < rows_max && run_ < work_.run_count) {
      const int32_t end =
          static_cast<int32_t>(std::min<int64_t>(work_.runs[run_].end, int64_t{last_} + 1));
      if (next_ < end) {
        AddPageRows(std::min(end - next_, rows_max - tile->count), tile);
      } else if (++run_ < work_.run_count) {
        next_ = work_.runs[run_].begin;
      }
    }
  }

 private:
  // Up to n rows from next_ that lie in one page.
  void AddPageRows(int n, RowTile* tile) {
    const int32_t slot = next_ % work_.k.page_tokens;
    const int rows = std::min(n, work_.k.page_tokens - slot);
    const std::byte* k = work_.k.Row(next_);
    const std::byte* v = work_.v.Row(next_);
    for (int i = 0; i < rows; ++i) {
      tile->k[tile->count + i] = k + i * work_.k.slot_stride;
      tile->v[tile->count + i] = v + i * work_.v.slot_stride;
      tile->position[tile->count + i] = next_ + i;
    }
    tile->count += rows;
    next_ += rows;
  }

  const AttendWork& work_;
  const int32_t last_;  // the last position that some query token sees
  int run_ = 0;
  int32_t next_ = 0;
};

}  // namespace kvstrata
