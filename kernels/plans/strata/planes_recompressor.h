// SPDX-License-Identifier: Apache-2.0
// The writing side of codec planes (docs/spec/planes.md, "Storage"). Private to planes.
#pragma once

#include <memory>

#include "kernels/codec/codec.h"
#include "kernels/codec/extent_bytes.h"

namespace kvstrata {

// `extent_bytes`: what an extent of several groups may weigh.
std::unique_ptr<Recompressor> NewPlanesRecompressor(const Plan& plan, const Geometry& geometry,
                                                    int64_t extent_bytes = kExtentBytesGoal);

}  // namespace kvstrata
