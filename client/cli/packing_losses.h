// SPDX-License-Identifier: Apache-2.0
// PackingLosses: what plan mosaickv makes of the traces' prompts on a running daemon: the
// strategies that its search chose, and the channel loss by how much is kept
// (docs/spec/mosaickv.md 5). Errors: those of the connection; anything about the plan or its arrays
// becomes a status.
#ifndef KVSTRATA_CLIENT_CLI_PACKING_LOSSES_H_
#define KVSTRATA_CLIENT_CLI_PACKING_LOSSES_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/metrics.h"
#include "client/cli/replay.h"

namespace kvstrata::cli {

struct StrategyCount {
  std::array<int32_t, 3>
      strategy{};     // elements kept, neighbours chosen together, tokens of a block
  int64_t count = 0;  // (segment, layer, KV head)
};

struct ChannelLoss {
  int32_t keep = 0;   // elements of a vector
  Distribution loss;  // over (segment, layer, KV head), keys and values as the daemon lists them
};

struct PackingLosses {
  // A plan packs from min_tokens on; a calibration wants to know at any length.
  std::string plan = "mosaickv{strategy = \"search\", max_loss = 1, min_tokens = 0}";
  std::string status = "ok";
  std::vector<StrategyCount> strategies;  // the most frequent first
  // "ok", or why `losses` is empty: the daemon need not have the array "losses", F32 [..., 4],
  // whose last dimension is the loss at d/8, d/4, 3d/8 and d/2.
  std::string losses_status = "ok";
  std::vector<ChannelLoss> losses;
};

// A failure that concerns one plan or array and not the daemon as a whole: a section's status.
bool IsOfSection(const Status& status);

Result<PackingLosses> MeasurePackingLosses(const std::vector<Trace>& traces,
                                           const ReplayOptions& options,
                                           const ReplayProgress& progress);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_PACKING_LOSSES_H_
