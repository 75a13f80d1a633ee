// SPDX-License-Identifier: Apache-2.0
// CalibratedPlans: named plans that follow from a calibration, and the file of them that the
// daemon's configuration takes (docs/configuration.md, "Named plans"). Pure.
#ifndef KVSTRATA_CLIENT_CLI_CALIBRATED_PLANS_H_
#define KVSTRATA_CLIENT_CLI_CALIBRATED_PLANS_H_

#include <string>
#include <vector>

#include "client/cli/calibrate.h"

namespace kvstrata::cli {

struct CalibratedPlan {
  std::string name;              // "chess_calibrated"
  std::string text;              // "chess{thresholds = [2.1, 0.8]}"
  std::vector<std::string> why;  // a line for each number: where it comes from
};

// Only plans of which the calibration says something.
std::vector<CalibratedPlan> PlansOf(const Calibration& calibration);

// TOML: `origin` lines as comments, then [plans] with the reasons above each.
std::string ToToml(const std::vector<CalibratedPlan>& plans,
                   const std::vector<std::string>& origin);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_CALIBRATED_PLANS_H_
