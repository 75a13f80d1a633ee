// SPDX-License-Identifier: Apache-2.0
// EntropyPages: what a model's next-token entropies are over whole pages of generated tokens, and
// the thresholds of plan chess that follow (docs/spec/chess.md 6; tests/reference/chess.py,
// calibrate). Pure.
#ifndef KVSTRATA_CLIENT_CLI_ENTROPY_PAGES_H_
#define KVSTRATA_CLIENT_CLI_ENTROPY_PAGES_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/metrics.h"
#include "client/cli/trace.h"

namespace kvstrata::cli {

struct EntropyPages {
  static constexpr int32_t kPage = 32;  // tokens; chess's own default
  static constexpr double kPercentile = 99;

  std::string status = "ok";
  // A sample a page, nats: of the pages that hold generated tokens only, as the daemon cuts them
  // (multiples of kPage from position 0).
  Distribution means, variances;
  std::array<double, 2> thresholds{};  // percentile of each, linearly interpolated
  double share_over = 0;               // share of the pages with both above their thresholds
};

EntropyPages MeasureEntropyPages(const std::vector<Trace>& traces);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_ENTROPY_PAGES_H_
