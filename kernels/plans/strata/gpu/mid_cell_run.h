// SPDX-License-Identifier: Apache-2.0
// A lower run that stands for one that is not here yet: read by all planes, codes of a group are
// then in the middle of their cells of plane 0, which is what they count as by that plane alone
// (docs/spec/planes.md, rule 8).
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/ops/pack_planes/planes_format.h"

namespace kvstrata {

// [lower_bytes()]. No digits are the middle itself: codes are half of a stored step below it or
// above, by channel, so that neither sums of channels nor rotated values lean to one side.
// Cost: some operations a code.
std::vector<std::byte> MidCellRun(const PlanesFormat& format);

}  // namespace kvstrata
