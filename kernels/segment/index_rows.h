// SPDX-License-Identifier: Apache-2.0
// Rows of IndexOptions, for the tables of the selectors whose segmenter keeps an index. They print
// them among their own.
#pragma once

#include "kernels/plan/plan_rows.h"

namespace kvstrata {

inline constexpr std::string_view kRestNames[] = {"drop", "mean"};

using IndexRows = RowsOf<&Plan::index>;
inline constexpr PlanOption kUnitRow =
    IndexRows::Int<&IndexOptions::unit, 1, 1024>("page").Or("unit");
inline constexpr PlanOption kChunkRow =
    IndexRows::Int<&IndexOptions::pages_per_chunk, 1, 64>("pages_per_chunk");
inline constexpr PlanOption kGridRow =
    IndexRows::Int<&IndexOptions::chunks_per_grid, 1, 64>("chunks_per_grid");
inline constexpr PlanOption kRestRow = IndexRows::Name<&IndexOptions::rest, kRestNames>("rest");

// PLAN_COMBINATION: a grid of units that no index block can hold.
Status CheckGrid(const IndexOptions& index);

}  // namespace kvstrata
