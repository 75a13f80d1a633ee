// SPDX-License-Identifier: Apache-2.0
// The writing side of codec packed (docs/spec/mosaickv.md, "Growing"). Private to mosaickv.
#pragma once

#include <memory>

#include "kernels/codec/codec.h"
#include "kernels/codec/extent_bytes.h"

namespace kvstrata {

// `extent_bytes`: a segment that weighs more is several extents, of 64 tokens at least.
std::unique_ptr<Recompressor> NewPackedRecompressor(const Plan& plan, const Geometry& geometry,
                                                    int64_t extent_bytes = kExtentBytesGoal);

}  // namespace kvstrata
