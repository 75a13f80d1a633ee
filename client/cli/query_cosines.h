// SPDX-License-Identifier: Apache-2.0
// QueryCosines: how alike the queries of consecutive decode steps are, and how often plan
// tokenselect would reuse a selection for it (docs/spec/tokenselect.md 3; docs/spec/beyond.md 4).
// Pure.
#ifndef KVSTRATA_CLIENT_CLI_QUERY_COSINES_H_
#define KVSTRATA_CLIENT_CLI_QUERY_COSINES_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/metrics.h"
#include "client/cli/trace.h"

namespace kvstrata::cli {

inline constexpr std::array<double, 4> kThetas = {0.8, 0.85, 0.9, 0.95};

struct LayerCosines {
  int32_t layer = 0;
  Distribution flattened;  // all heads as one vector; a sample a pair of steps
  Distribution smallest;   // the smallest among the heads' own cosines
};

// The steps of a layer whose query is as near to the one that selected last as theta asks.
struct HitRate {
  double theta = 0;
  double flattened = 0;  // cosine = "flat", the preset's
  double per_head = 0;   // cosine = "head": the smallest
};

struct QueryCosines {
  std::string status = "ok";
  int64_t steps = 0;  // in all traces; the first of each always selects
  std::vector<LayerCosines> layers;
  std::vector<HitRate> hit_rates;  // over all layers and steps
};

QueryCosines MeasureQueryCosines(const std::vector<Trace>& traces);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_QUERY_COSINES_H_
