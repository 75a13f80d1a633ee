// SPDX-License-Identifier: Apache-2.0
// Options of codec `packed` (docs/spec/mosaickv.md; fixed preset: ADR 13). Rows: packed_options.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct PackedOptions {
  bool search = false;     // `strategy = "search"`; else fixed: keep, neighbours, block
  int32_t keep = 0;        // elements of a vector; 0: d / 4
  int32_t neighbours = 1;  // channels chosen together: 1, 2, 4
  int32_t block = 8;       // tokens of a block key: 4, 8, 16
  double max_channel_loss = 0.05, max_block_loss = 0.5;
  bool truncate = true;
  int32_t segment = 65536, buffer = 32;
  double close_loss = 256.0;
  double drift = 0;  // `closing = "drift"` factor; 0: closing by loss (docs/spec/beyond.md 6)
  int32_t min_segment = 4096;  // where drift closes a segment

  bool operator==(const PackedOptions&) const = default;
};

}  // namespace kvstrata
