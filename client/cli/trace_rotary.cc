// SPDX-License-Identifier: Apache-2.0
#include "client/cli/trace_rotary.h"

#include <cmath>

namespace kvstrata::cli {

void TraceRotary::Rotate(int64_t position, std::span<double> row) const {
  const int32_t pairs = dim / 2;
  for (int32_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * std::pow(theta, -2.0 * i / dim);
    const double cos = std::cos(angle), sin = std::sin(angle);
    double& x = row[static_cast<size_t>(interleaved ? 2 * i : i)];
    double& y = row[static_cast<size_t>(interleaved ? 2 * i + 1 : i + pairs)];
    const double before = x;
    x = before * cos - y * sin;
    y = y * cos + before * sin;
  }
}

}  // namespace kvstrata::cli
