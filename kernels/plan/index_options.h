// SPDX-License-Identifier: Apache-2.0
// Options of segmenters `page`, `hierarchy` and `bits`, and of whoever reads the index that they
// keep. Their rows: index_rows.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvstrata {

// What becomes of units that are not selected (docs/spec/beyond.md 1): nothing, or one row of
// means.
enum class RestKind : uint8_t { kDrop, kMean };
std::string_view NameOf(RestKind k);

struct IndexOptions {
  int32_t unit = 16;  // `page`: tokens of a unit; quest 16, chess 32 (papers), bits 64 (ours)
  int32_t pages_per_chunk = 8, chunks_per_grid = 8;  // hierarchy alone (docs/spec/chess.md)
  RestKind rest = RestKind::kDrop;

  bool operator==(const IndexOptions&) const = default;
};

}  // namespace kvstrata
