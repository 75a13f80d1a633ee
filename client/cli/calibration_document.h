// SPDX-License-Identifier: Apache-2.0
// The document and the tables of a calibration; docs/cli.md, "calibrate", is their contract. Pure.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "client/cli/calibrate.h"
#include "client/cli/printer.h"

namespace kvstrata::cli {

// CalibratedPlans: named plans that follow from a calibration, and the file of them that the
// daemon's configuration takes (docs/configuration.md, "Named plans"). Pure.
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

// `paths` beside the traces; `file`: where the plans were written, "" if nowhere.
Json CalibrationDocument(const std::vector<Trace>& traces, const std::vector<std::string>& paths,
                         const Calibration& calibration, const std::vector<CalibratedPlan>& plans,
                         const std::string& file);
void PrintCalibration(const Style& style, const Json& document, std::ostream& out);

}  // namespace kvstrata::cli
