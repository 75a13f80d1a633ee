// SPDX-License-Identifier: Apache-2.0
// Makes the three extents of a range: coarse rows and routing, factors, raw rows. Private to
// sekv.
#pragma once

#include <vector>

#include "kernels/plans/sekv/span_parameters.h"

namespace kvstrata {

// What a part is to hold.
struct SpanRange {
  Run tokens;
  std::vector<Run> spans;        // ascending, disjoint, inside `tokens`
  std::vector<int32_t> anchors;  // positions that no earlier part names
  bool first = false;            // it holds tau and, if trained, the routers
};

struct SpanExtents {
  std::vector<std::byte> summary, factors, raw;
};

// Parallel over (layer, KV head). ABORTED when cancelled; FAILED_PRECONDITION when raw rows are
// missing.
Result<SpanExtents> WriteSpans(const RecompressInput& input, const Geometry& geometry,
                               const Plan& plan, const SpanParameters* parameters,
                               const SpanRange& range);

}  // namespace kvstrata
