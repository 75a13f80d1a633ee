// SPDX-License-Identifier: Apache-2.0
// TraceRotary: the rotary embedding that a trace's keys and queries still lack (docs/traces.md,
// `keys = pre_rope`), for oracles that attend as the daemon does. Pure; double precision.
#ifndef KVSTRATA_CLIENT_CLI_TRACE_ROTARY_H_
#define KVSTRATA_CLIENT_CLI_TRACE_ROTARY_H_

#include <cstdint>
#include <span>

namespace kvstrata::cli {

// Pair i of dim / 2 is rotated by position * theta^(-2i / dim).
struct TraceRotary {
  double theta = 0;
  int32_t dim = 0;  // channels that are rotated; 0: rows hold it already, and Rotate does nothing
  bool interleaved = false;  // pairs (2i, 2i + 1), else (i, i + dim / 2)

  // Rotates a row of one head to its position, in place.
  void Rotate(int64_t position, std::span<double> row) const;
};

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_TRACE_ROTARY_H_
