// SPDX-License-Identifier: Apache-2.0
// Calibrate: the numbers that plans want to know of a model before anybody chooses, from traces of
// it: entropy thresholds (chess), anchor and persistent shares (sekv), query cosines (tokenselect),
// packing losses (mosaickv) and break-even lengths.
//
// The first three come from the traces alone; the last two run them on a daemon. A section whose
// input is missing says so in its status; the others are not affected. Threads: one.
// Errors: CALIBRATE_MODELS (traces of different models), and those of the connection.
#ifndef KVSTRATA_CLIENT_CLI_CALIBRATE_H_
#define KVSTRATA_CLIENT_CLI_CALIBRATE_H_

#include <chrono>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/break_even.h"
#include "client/cli/entropy_pages.h"
#include "client/cli/packing_losses.h"
#include "client/cli/query_cosines.h"
#include "client/cli/span_shares.h"

namespace kvstrata::cli {

struct CalibrateOptions {
  std::string socket;
  std::chrono::milliseconds timeout{5000};
  bool offline = false;  // only what needs no daemon
};

struct Calibration {
  EntropyPages entropy;
  SpanShares spans;
  QueryCosines cosines;
  PackingLosses packing;
  BreakEven break_even;
};

// `names` are the traces' paths, for messages. REQUIRES: as many names as traces, at least one.
Status CheckSameModel(const std::vector<Trace>& traces, const std::vector<std::string>& names);

Result<Calibration> Calibrate(const std::vector<Trace>& traces,
                              const std::vector<std::string>& names,
                              const CalibrateOptions& options, const ReplayProgress& progress);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_CALIBRATE_H_
