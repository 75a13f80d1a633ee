// SPDX-License-Identifier: Apache-2.0
// Options of selector `zoom` (docs/spec/sekv.md; rows_share: ADR 14). Rows of the table: zoom.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct ZoomOptions {
  // All rows that a head reads in a step, not only chosen ones. -1: rows_share of the length; 0: no
  // limit.
  int32_t rows = -1;
  double rows_share = 0.25;

  bool operator==(const ZoomOptions&) const = default;
};

}  // namespace kvstrata
