// SPDX-License-Identifier: Apache-2.0
// What a sequence looks like at one moment: where its pages, index blocks and extents lie. A table
// names them; whoever reads a view does so while that table holds (docs/shm_layout.md).
//
// Plain data; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/pages/page_view.h"

namespace kvstrata {

// One extent of a sequence, as a table names it.
struct ExtentView {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  Run tokens;  // the header's begin and end
  // The extent's description, aligned to 8 bytes, and its size; null: `data` is readable itself.
  const std::byte* description = nullptr;
  int64_t description_bytes = 0;
  // The extent that belongs behind it is on its way from a tier: only a codec that can do without
  // it for so long may have one of these (codec.h, rest_waits).
  bool rest_due = false;
};

// One sequence at one moment: addresses and counts, valid during the call only.
struct SequenceView {
  // Storage pages in order of position; nullptr: its rows are held by extents alone.
  std::byte* const* pages = nullptr;
  std::byte* const* index_blocks = nullptr;  // index blocks in order of position
  int32_t tokens = 0;                        // tokens that all layers hold (committed)
  const ExtentView* extents = nullptr;       // what a codec holds, in order of position
  int32_t extent_count = 0;
  uint64_t version = 0;  // version of the table; extents change with it alone
  // By page: 1 where it lies in the host's memory, of a sequence whose steps run on a GPU; null:
  // nowhere.
  const uint8_t* host_pages = nullptr;
};

}  // namespace kvstrata
