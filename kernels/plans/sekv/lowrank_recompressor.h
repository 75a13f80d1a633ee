// SPDX-License-Identifier: Apache-2.0
// The writing side of codec lowrank (docs/spec/sekv.md). Private to sekv.
#pragma once

#include <memory>

#include "kernels/codec/extent_bytes.h"
#include "kernels/plans/sekv/span_parameters.h"

namespace kvstrata {

// `part_bytes`: raw bytes of the tokens of a part, unless one span is longer. REQUIRES: parameters
// came from ParseSpanParameters with this plan and geometry, or are null.
std::unique_ptr<Recompressor> NewSpanRecompressor(const Plan& plan, const Geometry& geometry,
                                                  std::shared_ptr<const SpanParameters> parameters,
                                                  int64_t part_bytes = kExtentBytesGoal);

}  // namespace kvstrata
