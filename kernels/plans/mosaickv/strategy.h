// SPDX-License-Identifier: Apache-2.0
// How many elements of a vector are kept, in what groups, and how long a block is
// (docs/spec/mosaickv.md 5): the plan's own numbers, or the most compressing ones whose losses stay
// below its thresholds. Private to mosaickv.
//
// Threads: pure. Cost of a search: it rotates the rows once for the candidate that fits, and a
// few thousand of them for each one that does not.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/backend/backend.h"
#include "kernels/plans/mosaickv/packed_options.h"

namespace kvstrata {

struct Strategy {
  int32_t keep = 0, neighbours = 1, block = 8;
  bool operator==(const Strategy&) const = default;
};

// Rows of one (layer, KV head), and the rotation that goes with them.
struct RotatedRows {
  PagedRows rows;
  const float* r = nullptr;  // [dim][dim]
  double energy = 0;         // about the sum of all squares: the trace of X^T X
};

Strategy FixedStrategy(const PackedOptions& options, int32_t head_dim);

Strategy SearchStrategy(const PackedOptions& options, const RotatedRows& keys,
                        const RotatedRows& values, Run run, const Backend& backend);

inline constexpr std::array<int32_t, 3> kSearchedBlocks = {16, 8, 4};

// Variance within blocks of kSearchedBlocks tokens over all variance, of rows [run.begin, run.end);
// 0 if all rows are equal. No rotation changes it.
std::array<double, 3> BlockLosses(const PagedRows& rows, Run run);

}  // namespace kvstrata
