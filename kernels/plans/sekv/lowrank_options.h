// SPDX-License-Identifier: Apache-2.0
// Options of codec `lowrank` and its spans (docs/spec/sekv.md; alpha: ADR 14). Rows:
// lowrank_options.cc.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/pages/tier.h"

namespace kvstrata {

struct LowRankOptions {
  double alpha = 2.0;
  int32_t l_min = 4, r_max = 32, d_route = 0;
  int32_t local = 512;         // last tokens of the prompt that stay raw
  std::string parameters;      // file of trained parameters in the daemon's folder; "" untrained
  Tier factors = Tier::kHost;  // where they are put, if there is room

  bool operator==(const LowRankOptions&) const = default;
};

}  // namespace kvstrata
