// SPDX-License-Identifier: Apache-2.0
// How much of a sequence a selection attends.
#pragma once

#include <cstdint>

#include "kernels/rows/selection.h"

namespace kvstrata {

// Rows attended, summed over groups and divided by their number, rounded up.
inline int64_t RowsPerHead(const Selection& selection) {
  if (selection.runs.empty()) return 0;
  int64_t rows = 0;
  for (const auto& list : selection.runs) {
    for (const Run& run : list) rows += run.end - run.begin;
  }
  return (rows + selection.groups() - 1) / selection.groups();
}

}  // namespace kvstrata
